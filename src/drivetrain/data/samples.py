"""How a user's samples become a batch: inputs and targets apart, each of them stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.trees import Tree, named_leaves

TARGETS = ("label", "labels", "target", "targets", "y")  # the keys that are a dict sample's target, where none is named
TargetKey = str | Sequence[str] | None


def split_sample(sample: Any, target_key: TargetKey, keep_dict: bool = False) -> tuple[Any, Any]:
    """Return the inputs and the target of a sample, or of a batch of the user's own. Raises UserError.

    A dict's target is what `target_key` names, a tuple's is its last item. A dict with one input gives that input, unless
    `keep_dict` is set.
    """
    if is_dataclass(sample):
        sample = {field.name: getattr(sample, field.name) for field in fields(sample)}
    if isinstance(sample, Mapping):
        keys = _target_keys(sample, target_key)
        x = {key: value for key, value in sample.items() if key not in keys}
        if not x:
            raise UserError(f"data=own: a sample has only its target, {', '.join(keys)}: give it inputs too")
        y = sample[keys[0]] if target_key is None or isinstance(target_key, str) else {key: sample[key] for key in keys}
        return (next(iter(x.values())) if len(x) == 1 and not keep_dict else x), y
    if target_key is not None:
        raise UserError(f"data.target_key={target_key} names a key, and a sample is a {type(sample).__name__}: let it be a dict")
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        raise UserError(
            f"data=own: a sample is a {type(sample).__name__}, which does not say what its target is: let it be (x, y), or a dict"
        )
    *inputs, y = sample
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), y


def _target_keys(sample: Mapping[str, Any], target_key: TargetKey) -> list[str]:
    """Return the keys of a sample that are its target. Raises UserError."""
    if target_key is None:
        found = [key for key in TARGETS if key in sample]
        if len(found) != 1:
            many = f"several that could be its target ({', '.join(found)})" if found else "none of " + ", ".join(TARGETS)
            raise UserError(f"data=own: a sample has the keys {', '.join(map(str, sample))}, {many}: set data.target_key")
        return found
    keys = [target_key] if isinstance(target_key, str) else list(target_key)
    if missing := [key for key in keys if key not in sample]:
        raise UserError(f"data.target_key={missing[0]}: a sample has only the keys {', '.join(map(str, sample))}")
    return keys


def _is_node(value: Any) -> bool:
    """Return whether a value is a part of a sample's structure, not a tensor, an array or (nested) numbers."""
    if isinstance(value, Mapping) or is_dataclass(value):
        return True
    return isinstance(value, tuple | list) and any(getattr(item, "ndim", 0) > 0 or _is_node(item) for item in value)


def as_tensors(value: Any, name: str) -> Tree:
    """Return a sample as a tree of tensors; `name` is what messages call it. Raises DataError.

    Numbers with fractions, such as NumPy's float64, become torch's default type, as the model's weights have it.
    """
    if isinstance(value, Mapping):
        return {key: as_tensors(item, f"{name}.{key}") for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        of_fields = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{key: as_tensors(item, f"{name}.{key}") for key, item in of_fields.items()})
    if _is_node(value):
        return tuple(as_tensors(item, f"{name}.{number}") for number, item in enumerate(value))
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise DataError(
            f"{name} is {kind}, which is no tensor, array or number ({error}): leave it out, or turn it into numbers"
        ) from None
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def tensors_of(sample: Any, target_key: TargetKey, keep_dict: bool = False) -> tuple[Tree, Tree]:
    """Return a sample's inputs and target as trees of tensors. Raises UserError."""
    x, y = split_sample(sample, target_key, keep_dict)
    return as_tensors(x, "x"), as_tensors(y, "y")


def named_parts(pair: tuple[Tree, Tree]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a sample's inputs and target with their names, such as "x.ids" and "y"."""
    found = [(part, name, t) for part, tree in zip("xy", pair, strict=True) for name, t in named_leaves(tree)]
    return [(f"{part}.{name}" if name else part, t) for part, name, t in found]


@dataclass
class Stack:
    """Makes a batch of samples of one shape."""

    target_key: TargetKey = None

    def __call__(self, samples: Sequence[Any], pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets. Raises DataError."""
        pairs = [tensors_of(sample, self.target_key) for sample in samples]
        return stacked([x for x, _ in pairs], "x", stack), stacked([y for _, y in pairs], "y", stack)


def stacked(values: list[Tree], name: str, together: Callable[[list[torch.Tensor], str], torch.Tensor]) -> Tree:
    """Return samples of one structure as a batch, each leaf put together by `together`. Raises DataError."""
    first = values[0]
    if isinstance(first, torch.Tensor) and all(isinstance(value, torch.Tensor) for value in values):
        return together(values, name)
    if isinstance(first, dict) and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {key: stacked([value[key] for value in values], f"{name}.{key}", together) for key in first}
    if isinstance(first, tuple) and all(isinstance(value, tuple) and len(value) == len(first) for value in values):
        return tuple(stacked(list(items), f"{name}.{n}", together) for n, items in enumerate(zip(*values, strict=True)))
    if is_dataclass(first) and not isinstance(first, type) and all(type(value) is type(first) for value in values):
        names = [field.name for field in fields(first)]
        rows = {key: [getattr(value, key) for value in values] for key in names}
        return replace(first, **{key: stacked(row, f"{name}.{key}", together) for key, row in rows.items()})
    raise DataError(f"{name} is not of the same structure in all of them: give each sample the same keys")


def stack(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    """Return tensors of one shape as a batch (n, …)."""
    check_shapes(tensors, name)
    return torch.stack(tensors)


def check_shapes(tensors: list[torch.Tensor], name: str) -> None:
    """Raise DataError if these tensors have several shapes."""
    if len(shapes := sorted({tuple(t.shape) for t in tensors})) > 1:
        hint = ": data.pad=true pads sequences" if all(s[1:] == shapes[0][1:] and s for s in shapes) else ""
        raise DataError(f"{name} has the shapes {list(shapes[0])} and {list(shapes[-1])}{hint}")
