"""How samples of a user's own Dataset become a batch: inputs and targets, stacked, padded, or put together by the user."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.step.trees import Tree, named_leaves
from drivetrain.core.user.call import UserCall
from drivetrain.data.base import IGNORE_INDEX
from drivetrain.data.draws import MapStyle, Reader

logger = logging.getLogger(__name__)

TARGETS = ("label", "labels", "target", "targets", "y")  # the keys that are a dict sample's target, where none is named
TargetKey = str | Sequence[str] | None


def split_sample(sample: object, target_key: TargetKey, keep_dict: bool = False) -> tuple[Any, Any]:
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
            f"data=own: a sample is a {type(sample).__name__}, which does not say what its target is: let it be (x, y), "
            "(x, x) where the loss takes none, or a dict"
        )
    *inputs, y = sample
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), y


def _target_keys(sample: Mapping[str, object], target_key: TargetKey) -> list[str]:
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


def _is_node(value: object) -> bool:
    """Return whether a value is a part of a sample's structure, not a tensor, an array or (nested) numbers."""
    if isinstance(value, Mapping) or is_dataclass(value):
        return True
    return isinstance(value, tuple | list) and any(getattr(item, "ndim", 0) > 0 or _is_node(item) for item in value)


def as_tensors(value: Any, name: str) -> Tree:
    """Return a sample as a tree of tensors and Nones; `name` is what messages call it. Raises DataError.

    Numbers with fractions, such as NumPy's float64, become torch's default type, as the model's weights have it.
    """
    if value is None and "." in name:  # a field that no sample has to fill
        return None
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
        if value is None:
            raise DataError(f"{name} is None: give the inputs again, (x, x), where the loss takes no target") from None
        raise DataError(
            f"{name} is a {type(value).__name__}, which is no tensor, array or number ({error}): leave it out, or turn it "
            "into numbers"
        ) from None
    if tensor.layout != torch.strided or tensor.is_nested:  # a batch of these is made in another way
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise DataError(
            f"{name} is a {kind} tensor: give a dense one, as .to_dense() is, or indices and values as tensors of their own"
        )
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def tensors_of(sample: object, target_key: TargetKey, keep_dict: bool = False) -> tuple[Tree, Tree]:
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

    def __call__(self, samples: Sequence[object], pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets. Raises DataError."""
        pairs = [tensors_of(sample, self.target_key) for sample in samples]
        return stacked([x for x, _ in pairs], "x", stack), stacked([y for _, y in pairs], "y", stack)


def stacked(values: list[Tree], name: str, together: Callable[[list[torch.Tensor], str], torch.Tensor]) -> Tree:
    """Return samples of one structure as a batch, each leaf put together by `together`. Raises DataError."""
    first = values[0]
    if all(value is None for value in values):
        return None
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
    """Return tensors of one shape as a batch (n, …). Raises DataError."""
    if len(shapes := sorted({tuple(t.shape) for t in tensors})) > 1:
        is_sequence = all(s[1:] == shapes[0][1:] and s for s in shapes)
        mend = "data.pad=true pads sequences" if is_sequence else "resize or pad them, or set evaluate_batch=1 for evaluations"
        raise DataError(f"{name} has the shapes {list(shapes[0])} and {list(shapes[-1])}: {mend}")
    return torch.stack(tensors)


MASK = "mask"  # the input that marks the real positions of a padded sequence
ITS_NAME = {"input_ids": "attention_mask"}  # where inputs have the names of transformers
LOOKED_AT = 16  # samples that show whether a set's samples differ in length


@dataclass
class Pad:
    """Makes a batch of samples of several lengths, padded on the right: inputs with 0, whole-number targets with IGNORE_INDEX.

    Inputs that are a dict get a `mask` (n, length), true where a position is real, unless they have one; `attention_mask`
    where the sequence is `input_ids`.
    """

    target_key: TargetKey
    sequence: str  # the part of a sample whose length is the sample's, such as "x.ids"
    along: frozenset[str]  # all parts that are as long as it
    longest: int = 0  # sample of the set

    def __call__(self, samples: Sequence[object], pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets. Their length is a multiple of `pad_to`, or that of the set's longest sample."""
        pairs = [tensors_of(sample, self.target_key, keep_dict=True) for sample in samples]
        lengths = [len(dict(named_parts(pair))[self.sequence]) for pair in pairs]
        length = max(max(lengths), min(-(-max(lengths) // pad_to) * pad_to, self.longest))

        def padded(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
            if name in self.along:
                return _padded(tensors, name, length)
            differ = all(t.ndim for t in tensors) and len({len(t) for t in tensors}) > 1
            return _padded(tensors, name, max(map(len, tensors))) if differ else stack(tensors, name)

        x, y = stacked([x for x, _ in pairs], "x", padded), stacked([y for _, y in pairs], "y", padded)
        mask = ITS_NAME.get(self.sequence.removeprefix("x."), MASK)
        if isinstance(x, dict) and mask not in x and self.sequence.startswith("x"):
            x[mask] = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
        return x, y


def _padded(tensors: list[torch.Tensor], name: str, length: int) -> torch.Tensor:
    """Return sequences as a batch (n, length, …). Raises DataError."""
    if len({t.shape[1:] for t in tensors}) > 1:
        stack(tensors, name)  # which refuses them
    counts = not (tensors[0].is_floating_point() or tensors[0].dtype == torch.bool)
    value = IGNORE_INDEX if counts and name.split(".")[0] == "y" else 0
    batch = tensors[0].new_full((len(tensors), length, *tensors[0].shape[1:]), value)
    for row, tensor in zip(batch, tensors, strict=True):
        row[: len(tensor)] = tensor
    return batch


class Lengths:
    """The lengths of the parts of a set's samples, by name. A sample is read once for them."""

    def __init__(self, dataset: MapStyle, target_key: TargetKey) -> None:
        self.dataset, self.target_key, self._reader = dataset, target_key, Reader[list[object]](dataset, list)
        self._read: dict[int, dict[str, int]] = {}

    def of(self, index: int) -> dict[str, int]:
        """Return the length of each part of a sample that has one."""
        if index not in self._read:
            parts = named_parts(tensors_of(self._reader.look([index])[0], self.target_key, keep_dict=True))
            self._read[index] = {name: len(t) for name, t in parts if t.ndim}
        return self._read[index]

    def differing(self, indices: Iterable[int]) -> list[str]:
        """Return the parts that differ in length between these samples, the inputs first."""
        seen = [self.of(i) for i in indices]
        return [name for name in seen[0] if len({sizes.get(name) for sizes in seen}) > 1]

    def given(self) -> torch.Tensor | None:
        """Return the lengths (n,) from the Dataset's own attribute `lengths`."""
        lengths = getattr(self.dataset, "lengths", None)
        return None if lengths is None else torch.as_tensor(lengths, dtype=torch.int64)

    def all(self, name: str) -> torch.Tensor:
        """Return the lengths (n,) of one part of the samples: the Dataset's own, or found by reading all samples."""
        if (given := self.given()) is not None:
            return given
        began, left = time.perf_counter(), len(self.dataset) - len(self._read)
        lengths = torch.tensor([self.of(i)[name] for i in range(len(self.dataset))])
        if (seconds := time.perf_counter() - began) > 1:
            logger.info(
                "read %d samples for their lengths, in %.0f s: a Dataset with an attribute `lengths` saves that", left, seconds
            )
        return lengths


def padding_for(dataset: MapStyle, pad: bool | str | None, target_key: TargetKey) -> tuple[Pad, torch.Tensor] | None:
    """Return how a set's samples are padded, and their lengths (n,); None if they are not padded. Raises UserError.

    `pad` is the setting data.pad: a name says which input is the sequence; None looks at the first samples.
    """
    if pad is False:
        return None
    lengths, count = Lengths(dataset, target_key), len(dataset)
    looked_at = range(min(LOOKED_AT, count))
    if pad is None and not lengths.differing(looked_at):
        return None
    given = lengths.given()
    shown = range(count) if given is None else sorted({*looked_at, int(given.argmin()), int(given.argmax())})
    differing, parts = lengths.differing(shown), lengths.of(0)
    names = [f"x.{pad}"] if isinstance(pad, str) else [*differing, *parts]
    if not names or names[0] not in parts:
        raise UserError(
            f"data.pad={str(pad).lower() if isinstance(pad, bool) else pad}, and the parts of a sample that have a length are "
            f"{', '.join(parts) or 'none'}: name one of its inputs"
        )
    sequence = names[0]
    if given is not None and (wrong := [i for i in shown if lengths.of(i)[sequence] != given[i]]):
        raise UserError(
            f"the Dataset's lengths say {int(given[wrong[0]])} for sample {wrong[0]}, whose {sequence} has a length of "
            f"{lengths.of(wrong[0])[sequence]}: mend its `lengths`, or name the sequence in data.pad"
        )
    along = {n for n in differing if all(lengths.of(i).get(n) == lengths.of(i)[sequence] for i in shown)} | {sequence}
    logger.info("samples differ in length: %s padded to the longest of each batch", " and ".join(sorted({*differing, *along})))
    measured = lengths.all(sequence)
    return Pad(target_key, sequence, frozenset(along), int(measured.max())), measured


class OwnCollate:
    """The user's own function that makes a batch, which is taken apart as a sample is.

    It gets a list of samples or, where its parameters are x (or input) and y (or target), a list of the inputs and one of the
    targets.
    """

    def __init__(self, collate: Any, setting: str, target_key: TargetKey) -> None:
        self.collate, self.setting, self.target_key = collate, setting, target_key
        self._takes_pad_to = "pad_to" in inspect.signature(collate).parameters
        self._calls: dict[int, UserCall] = {}

    def __call__(self, samples: Sequence[object], pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets. Raises UserError."""
        if pad_to > 1 and not self._takes_pad_to:
            raise UserError(
                f"{self.setting} takes no argument `pad_to`, the multiple that batch=bucketed and loader=resident pad to: "
                "give it one, or set batch.pad_to=1 and another loader"
            )
        if (call := self._calls.get(pad_to)) is None:
            kwargs = {"pad_to": pad_to} if self._takes_pad_to else {}
            call = self._calls[pad_to] = UserCall(
                self.setting, self.collate, kwargs, offers=("input", "target"), positions=("samples",), decides=("target",)
            )
        if call.positional:
            return tensors_of(call.function(samples), self.target_key)
        pairs = [split_sample(sample, self.target_key) for sample in samples]
        return tensors_of(call(input=[x for x, _ in pairs], target=[y for _, y in pairs]), self.target_key)
