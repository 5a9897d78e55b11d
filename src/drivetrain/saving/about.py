"""What a checkpoint's manifest says of its model: the types and bounds of its entries, checked without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from drivetrain.core.targets import TargetKind
from drivetrain.core.typed import fits

MOST = 2**31  # of a size: that of a dimension, of outputs, of a vocabulary
DEEPEST = 20  # levels of a tree of inputs
DTYPES = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"))
NAMES = frozenset(("targets", "shape", "inputs", "images", "outputs", "classes", "dtype", "vocabulary", "normalize"))
Moments = dict[str, list[float]] | None  # mean and std, each with a number per channel or value


def problem(about: Mapping[str, Any]) -> str | None:
    """Return the first entry that no run could have written, such as "shape=[-3]"; None where there is none.

    An empty mapping is of a run that described nothing.
    """
    if not about:
        return None
    if missing := NAMES - about.keys():
        return f"no {min(missing)}"
    names, outputs, inputs = about["classes"], about["outputs"], about["inputs"]
    good = {
        "targets": about["targets"] in (None, *get_args(TargetKind)),
        "shape": (about["shape"] is None) if inputs is not None else _is_shape(about["shape"]),
        "inputs": inputs is None or _is_tree(inputs),
        "images": fits(about["images"], str | None),
        "decodes_images": fits(about.get("decodes_images"), bool | None),
        "outputs": _is_size(outputs),
        "classes": names is None or (fits(names, list[str]) and _name_outputs(len(names), outputs, about["targets"])),
        "dtype": about["dtype"] in (None, *DTYPES),
        "vocabulary": about["vocabulary"] is None or _is_size(about["vocabulary"]),
        "normalize": _are_moments(about["normalize"]),
        "files": fits(about.get("files"), dict[str, str] | None),
        "pixels": _is_range(about.get("pixels")),
        "units": _are_moments(about.get("units")),
    }
    return next((f"{name}={about.get(name)!r:.80}" for name, is_good in good.items() if not is_good), None)


def _name_outputs(names: int, outputs: Any, targets: Any) -> bool:
    """Whether so many names are those of the outputs. A loss may want several outputs for each value, such as its quantiles."""
    several = targets in ("values", None) and names > 0 and _is_size(outputs) and outputs % names == 0
    return names == outputs or several


def _is_size(value: Any) -> bool:
    return fits(value, int) and 0 < value < MOST


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(_is_size(size) for size in value) and math.prod(value) < MOST


def _is_tree(value: object, deep: int = 0) -> bool:
    """Whether it is the structure of inputs, as engine/description.py writes it."""
    if not isinstance(value, dict) or deep > DEEPEST:
        return False
    if "keys" in value:
        return isinstance(value["keys"], dict) and all(_is_tree(each, deep + 1) for each in value["keys"].values())
    if "items" in value:
        return isinstance(value["items"], list) and all(_is_tree(each, deep + 1) for each in value["items"])
    return _is_shape(value.get("shape")) and value.get("dtype") in DTYPES


def _is_range(value: object) -> bool:
    """Whether it is the range of pixel values, as engine/description.py writes it."""
    if value is None:
        return True
    if not isinstance(value, dict) or value.keys() != {"low", "high", "said"} or not fits(value["said"], bool):
        return False
    return fits([value["low"], value["high"]], list[float]) and -math.inf < value["low"] < value["high"] < math.inf


def _are_moments(value: Any) -> bool:
    if value is None:
        return True
    return fits(value, Moments) and value.keys() == {"mean", "std"} and 0 < len(value["mean"]) == len(value["std"])
