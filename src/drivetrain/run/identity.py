"""The identity of a run: the hash of its config, and differences between configs.

Machine-local keys (paths, devices, loggers) belong to this machine, not to a recipe, and are not part of the identity.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection

from drivetrain.config.composed import Composed, flatten
from drivetrain.core.typed import JsonObject, is_number

MAY_LENGTHEN = ("epochs", "updates")  # keys that a resumed run may change


def reads_environment(value: object) -> bool:
    """True if an unresolved value refers to the environment, which no recipe may."""
    return "${oc." in str(value)


def is_machine_local(key: str, machine_local_keys: Collection[str]) -> bool:
    """True if a dotted key is one of the machine-local keys, or below one."""
    return key in machine_local_keys or any(key.startswith(f"{k}.") for k in machine_local_keys)


def without_machine_local(composed: Composed, machine_local_keys: set[str]) -> JsonObject:
    """The config without its machine-local keys, as dotted keys."""
    return {k: v for k, v in flatten(composed.plain).items() if not is_machine_local(k, machine_local_keys)}


def config_hash(composed: Composed, machine_local_keys: set[str]) -> str:
    """The hash of a config without its machine-local keys: two runs with the same hash are the same run."""
    flat = without_machine_local(composed, machine_local_keys)
    return hashlib.sha256(json.dumps(flat, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _length(value: object) -> float:
    """A number of updates or epochs; null, or any other value in a damaged file, is infinite."""
    return float(value) if is_number(value) and value else math.inf


def differences(old: dict[str, object], new: dict[str, object], machine_local_keys: set[str]) -> list[str]:
    """The keys in which two configs differ, as "key: old → new". Machine-local keys may differ, and a run may become longer.

    If another option of a group was chosen, the group is listed without its keys.
    """
    a, b = flatten(old), flatten(new)
    skip = machine_local_keys | set(MAY_LENGTHEN)
    keys = [k for k in {**a, **b} if a.get(k) != b.get(k) and not is_machine_local(k, skip)]
    keys += [k for k in MAY_LENGTHEN if _length(b.get(k)) < _length(a.get(k))]
    chosen = [k.removesuffix("._target_") for k in keys if k.endswith("._target_")]
    keys = [k for k in keys if not k.startswith(tuple(f"{group}." for group in chosen))]
    classes = [(g, *(str(config.get(f"{g}._target_")).rpartition(".")[2] for config in (a, b))) for g in chosen]
    values = [(k, *("null" if value is None else value for value in (a.get(k, "absent"), b.get(k, "absent")))) for k in keys]
    return [f"{key}: {was} → {now}" for key, was, now in sorted([*classes, *values], key=str)]


def machine_local_overrides(composed: Composed, machine_local_keys: set[str]) -> JsonObject:
    """The machine-local settings, and all that the environment sets, as overrides (key → value) for a resume."""
    values = flatten(composed.unresolved)
    values = {k: v for k, v in values.items() if is_machine_local(k, machine_local_keys) or reads_environment(v)}
    values = {k: v for k, v in values.items() if k.split(".")[0] not in ("resume", "resume_changed", "recipe")}
    values = {k: v for k, v in values.items() if k != "logger" and not k.endswith("._target_")}
    return {**values, "logger": composed.choice("logger")}
