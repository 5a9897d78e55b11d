"""What makes a run the same run: its config's hash and differences, its recipe, and its operator's part."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from omegaconf import OmegaConf

from drivetrain.config.compose import Composed

MAY_LENGTHEN = ("epochs", "updates")  # what a resumed run may change


def operator_values(composed: Composed, machine_local_keys: set[str]) -> dict[str, Any]:
    """The operator's part of the config, unresolved: paths, loggers, device, and what the environment gave."""
    given = flatten(OmegaConf.to_container(composed.config))
    return {k: v for k, v in given.items() if _is_operators(k, machine_local_keys) or _is_of_environment(v)}


def _is_of_environment(value: Any) -> bool:
    """Whether a value, unresolved, refers to the environment: no recipe may."""
    return "${oc." in str(value)


def _is_operators(key: str, machine_local_keys: set[str]) -> bool:
    return key in machine_local_keys or any(key.startswith(f"{o}.") for o in machine_local_keys)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; an empty mapping is a value."""
    if not isinstance(tree, dict) or not tree:
        return {prefix[:-1]: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def without_operators(composed: Composed, machine_local_keys: set[str]) -> dict[str, Any]:
    """The config without the operator's part, as dotted keys."""
    return {k: v for k, v in flatten(composed.plain).items() if not _is_operators(k, machine_local_keys)}


def config_hash(composed: Composed, machine_local_keys: set[str]) -> str:
    """What makes two runs the same run: the config without the operator's part."""
    flat = without_operators(composed, machine_local_keys)
    return hashlib.sha256(json.dumps(flat, sort_keys=True, default=str).encode()).hexdigest()[:16]


def differences(old: dict[str, Any], new: dict[str, Any], machine_local_keys: set[str]) -> list[str]:
    """Keys in which two configs differ, as 'key: old → new', without the operator's part; a run may become longer.

    A group of which another option was chosen is one of them, its knobs are not.
    """
    a, b = flatten(old), flatten(new)
    skip = machine_local_keys | set(MAY_LENGTHEN)
    keys = [k for k in {**a, **b} if a.get(k) != b.get(k) and not _is_operators(k, skip)]
    keys += [k for k in MAY_LENGTHEN if (b.get(k) or math.inf) < (a.get(k) or math.inf)]
    chosen = [k.removesuffix("._target_") for k in keys if k.endswith("._target_")]
    keys = [k for k in keys if not k.startswith(tuple(f"{group}." for group in chosen))]
    classes = [(g, *(str(config.get(f"{g}._target_")).rpartition(".")[2] for config in (a, b))) for g in chosen]
    values = [(k, a.get(k, "absent"), b.get(k, "absent")) for k in keys]
    return [f"{key}: {was} → {now}" for key, was, now in sorted([*classes, *values], key=str)]


def to_recipe(composed: Composed, machine_local_keys: set[str]) -> str:
    """The recipe that replays a config: every group's option, and the values that differ from the option's own."""
    chosen = {g: o for g, o in composed.choices.items() if g not in machine_local_keys}
    plain = flatten(composed.option_defaults)
    given = flatten(OmegaConf.to_container(composed.config))
    differing = {k: v for k, v in given.items() if plain.get(k) != v and not _is_operators(k, machine_local_keys)}
    outside = sorted(k for k, v in differing.items() if _is_of_environment(v))
    for key in outside:
        del differing[key]
    tree = OmegaConf.create({})
    for key, value in differing.items():
        OmegaConf.update(tree, key, value, force_add=True)
    lines = [f"description: {json.dumps(composed.recipe.description)}"] if composed.recipe and composed.recipe.description else []
    lines += ["defaults:"] + [f"  - override /{g}: {json.dumps(o) if isinstance(o, list) else o}" for g, o in chosen.items()]
    lines += [f"# {key} came from the environment: give it on the command line" for key in outside]
    return "\n".join(lines) + "\n" + (OmegaConf.to_yaml(tree) if differing else "")


def operator_words(operator: dict[str, Any], composed: Composed) -> dict[str, Any]:
    """The operator's settings as override keys and values: options of its groups, values elsewhere."""
    words = {k: v for k, v in operator.items() if k.split(".")[0] not in ("logger", "resume", "resume_changed", "recipe")}
    return {**words, "logger": composed.choices["logger"]}
