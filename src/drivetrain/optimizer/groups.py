"""Parameter groups: which parameters decay, and the learning rate of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, Le

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.allowed import NAME_PATTERN, Entries, NamePattern, flatten, matches
from drivetrain.core.options.option import NonNegative, Option, Positive
from drivetrain.core.step.blocks import repeated_blocks

LayerDecay = Annotated[float, Gt(0), Le(1)]


@dataclass(kw_only=True, eq=False)
class Hyperparameters(Option, groups.Optimizer):
    """Learning rate, weight decay, their parameters, and the implementation.

    Each option gives `lr` and `weight_decay` their defaults.
    """

    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    why_fixed: ClassVar[str] = "its state continues in the next stage"
    lr: Positive
    weight_decay: NonNegative
    final_weight_decay: NonNegative | None = None
    decay_norm_and_bias: bool = False
    no_weight_decay: list[NamePattern] = field(default_factory=list)
    layer_decay: LayerDecay | None = None
    lr_multipliers: Annotated[dict[str, Any], Entries(NAME_PATTERN)] = field(default_factory=dict)
    fused: bool | None = None
    foreach: bool | None = None


GroupSettings = Callable[[str, bool], dict[str, object]]  # (parameter's name, True if it decays) → further settings of its group


def parameter_groups(
    model: torch.nn.Module, option: Hyperparameters, lr: float, group_settings: GroupSettings
) -> list[dict[str, Any]]:
    """The trainable parameters, those with equal settings in one group. The group with the plain `lr` comes first.

    Vectors and scalars (norms and biases) and the names from the model's own `no_weight_decay()` have no weight decay,
    unless `decay_norm_and_bias` is set; nor do matches of the option's `no_weight_decay`. Raises UserError for `layer_decay`
    on a model without layers.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise UserError("the model has no trainable parameter: there is nothing to optimize")
    multipliers = flatten(option.lr_multipliers)
    layer_factors = layer_decay_factors(model, option.layer_decay) if option.layer_decay is not None else {}
    models_own: set[str] = getattr(model, "no_weight_decay", set)()
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, p in named.items():
        exempt = p.ndim <= 1 or any(matches(name, pattern) for pattern in models_own)
        listed = any(matches(name, pattern) for pattern in option.no_weight_decay)
        decayed = not listed and (option.decay_norm_and_bias or not exempt)
        factor = layer_factors.get(name, 1.0) * math.prod(m for pattern, m in multipliers.items() if matches(name, pattern))
        settings = {"weight_decay": option.weight_decay if decayed else 0.0, **group_settings(name, decayed)}
        key = (factor != 1.0, not decayed and option.weight_decay > 0, factor, *settings.values())
        groups.setdefault(key, {"params": [], "lr": lr * factor, **settings})["params"].append(p)
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]


def trained_names(model: torch.nn.Module) -> set[str]:
    """The names of the trained parameters, here or on another rank; the latter have no memory here (device "meta")."""
    return {name for name, p in model.named_parameters() if p.requires_grad or p.is_meta}


def layer_decay_factors(model: torch.nn.Module, decay: float) -> dict[str, float]:
    """Parameter's name → decay^(number of layers above it): 1 in the head, smallest at the input (Clark et al. 2020, BEiT)."""
    depth = dict(_depths(model))
    top = max(depth.values())
    if top == 0:
        raise UserError(
            f"optimizer.layer_decay={decay} needs a model of several layers, but finds neither timm's group_matcher nor "
            "repeated blocks in this one: set optimizer.layer_decay=null, and optimizer.lr_multipliers for single parts"
        )
    return {name: decay ** (top - d) for name, d in depth.items()}


def _depths(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """(parameter's name, layer from 0): timm's layers for a model of timm, else the repeated blocks.

    With repeated blocks, the modules before them are layer 0, and the modules after them (the head) are the last layer.
    """
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
        depth = n or (len(blocks) + 1 if i > last else depth)  # parameters between two blocks belong to the block before
        yield name, depth
