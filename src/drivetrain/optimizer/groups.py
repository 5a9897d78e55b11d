"""Parameter groups: which parameters decay, and which multiple of the learning rate each one has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from drivetrain.core.blocks import repeated_blocks
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.lazy import torch
from drivetrain.optimizer.knobs import Knobs

Tags = Callable[[str, bool], dict[str, Any]]  # (parameter's name, whether it decays) → what else its group says


def parameter_groups(model: torch.nn.Module, knobs: Knobs, lr: float, tags: Tags) -> list[dict[str, Any]]:
    """The trainable parameters, those that share all settings in one group; the group with the plain `lr` comes first.

    Not decayed are vectors and scalars (norms and biases), what the model's own `no_weight_decay()` names and what
    `knobs.no_weight_decay` matches. Raises UserError for patterns that match nothing and a `layer_decay` without layers.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise UserError("the model has no trainable parameter: there is nothing to optimize")
    multiples = flat(knobs.lr_multipliers)
    unmatched(named, {"optimizer.no_weight_decay": knobs.no_weight_decay, "optimizer.lr_multipliers": list(multiples)})
    share = layer_shares(model, knobs.layer_decay) if knobs.layer_decay is not None else {}
    models_own: set[str] = getattr(model, "no_weight_decay", set)()
    groups: dict[Any, dict[str, Any]] = {}
    for name, p in named.items():
        kept = p.ndim <= 1 or any(matches(name, own) for own in models_own)
        decayed = not any(matches(name, pattern) for pattern in knobs.no_weight_decay) and (knobs.decay_norm_and_bias or not kept)
        multiple = share.get(name, 1.0) * math.prod(m for pattern, m in multiples.items() if matches(name, pattern))
        settings = {"weight_decay": knobs.weight_decay if decayed else 0.0, **tags(name, decayed)}
        key = (multiple != 1.0, not decayed, multiple, *settings.values())
        groups.setdefault(key, {"params": [], "lr": lr * multiple, **settings})["params"].append(p)
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern (* and ? stand for anything) is the parameter's name, or that of a module it lies in."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")


def unmatched(named: dict[str, Any], patterns: dict[str, list[str]]) -> None:
    """Raise UserError for every pattern (by its key) that matches no parameter: it would have no effect."""
    modules = {name.rpartition(".")[0] for name in named} - {""}
    problems = [
        f"{key}: {pattern!r} matches no trainable parameter of the model: {did_you_mean(pattern, {*named, *modules})}"
        for key, given in patterns.items()
        for pattern in given
        if not any(matches(name, pattern) for name in named)
    ]
    if problems:
        raise UserError(problems)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings under dotted keys: `{head: {bias: 2}}` from a recipe says the same as `{head.bias: 2}`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def layer_shares(model: torch.nn.Module, decay: float) -> dict[str, float]:
    """Parameter's name → decay^(layers above it): 1 in the head, least at the input (Clark et al. 2020, BEiT)."""
    depth = dict(_depths(model))
    top = max(depth.values())
    if top == 0:
        raise UserError(
            f"optimizer.layer_decay={decay} wants a model of several layers, but finds neither timm's group_matcher nor "
            "repeated blocks in this one: set optimizer.layer_decay=null, and optimizer.lr_multipliers for single parts"
        )
    return {name: decay ** (top - d) for name, d in depth.items()}


def _depths(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """(name, layer from 0) by timm's own layers, else by the repeated blocks: before them is 0, after them the head."""
    names = [name for name, _ in model.named_parameters()]
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        layers = group_parameters(model, matcher(coarse=False), reverse=True)
        yield from ((name, layers.get(name, max(layers.values()))) for name in names)
        return
    blocks = repeated_blocks(model)
    prefixes = [f"{name}." for block in blocks for name, module in model.named_modules() if module is block]
    inside = [next((n for n, prefix in enumerate(prefixes, 1) if name.startswith(prefix)), None) for name in names]
    depth, last = 0, max((i for i, n in enumerate(inside) if n), default=len(names))
    for i, (name, n) in enumerate(zip(names, inside, strict=True)):
        depth = n or (len(blocks) + 1 if i > last else depth)  # between blocks: with the block before
        yield name, depth
