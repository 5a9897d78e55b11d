"""Pads the samples of a user's Dataset that differ in length."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.trees import Tree
from drivetrain.data.base import IGNORE_INDEX
from drivetrain.data.draws import Reader
from drivetrain.data.samples import TargetKey, check_shapes, named_parts, stack, stacked, tensors_of

MASK = "mask"  # the input that says which positions of a padded sequence are real
ITS_NAME = {"input_ids": "attention_mask"}  # where inputs have the names of transformers
LOOKED_AT = 16  # samples that show whether a set's samples differ in length

logger = logging.getLogger(__name__)


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

    def __call__(self, samples: Sequence[Any], pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets. Their length is a multiple of `pad_to`, or that of the set's longest sample."""
        pairs = [tensors_of(sample, self.target_key, keep_dict=True) for sample in samples]
        lengths = [len(dict(named_parts(pair))[self.sequence]) for pair in pairs]
        length = max(max(lengths), min(-(-max(lengths) // pad_to) * pad_to, self.longest))

        def padded(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
            if name in self.along:
                return _padded(tensors, name, length)
            return _padded(tensors, name, max(map(len, tensors))) if _differ_in_length(tensors) else stack(tensors, name)

        x, y = stacked([x for x, _ in pairs], "x", padded), stacked([y for _, y in pairs], "y", padded)
        mask = ITS_NAME.get(self.sequence.removeprefix("x."), MASK)
        if isinstance(x, dict) and mask not in x and self.sequence.startswith("x"):
            x[mask] = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
        return x, y


def _differ_in_length(tensors: list[torch.Tensor]) -> bool:
    return all(t.ndim for t in tensors) and len({len(t) for t in tensors}) > 1


def _padded(tensors: list[torch.Tensor], name: str, length: int) -> torch.Tensor:
    """Return sequences as a batch (n, length, …). Raises DataError."""
    if len({t.shape[1:] for t in tensors}) > 1:
        check_shapes(tensors, name)
    counts = not (tensors[0].is_floating_point() or tensors[0].dtype == torch.bool)
    value = IGNORE_INDEX if counts and name.split(".")[0] == "y" else 0
    batch = tensors[0].new_full((len(tensors), length, *tensors[0].shape[1:]), value)
    for row, tensor in zip(batch, tensors, strict=True):
        row[: len(tensor)] = tensor
    return batch


class Lengths:
    """The lengths of the parts of a set's samples, by name. A sample is read once for them."""

    def __init__(self, dataset: Any, target_key: TargetKey) -> None:
        self.dataset, self.target_key, self._reader = dataset, target_key, Reader(dataset)
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
        """Return the lengths (n,) that the Dataset itself tells, by an attribute `lengths`."""
        lengths = getattr(self.dataset, "lengths", None)
        return None if lengths is None else torch.as_tensor(lengths, dtype=torch.int64)

    def all(self, name: str) -> torch.Tensor:
        """Return the lengths (n,) of one part of the samples, as the Dataset tells them, or else by reading all samples."""
        if (given := self.given()) is not None:
            return given
        began, left = time.perf_counter(), len(self.dataset) - len(self._read)
        lengths = torch.tensor([self.of(i)[name] for i in range(len(self.dataset))])
        if (seconds := time.perf_counter() - began) > 1:
            logger.info(
                "read %d samples for their lengths, in %.0f s: a Dataset with an attribute `lengths` saves that", left, seconds
            )
        return lengths


def padding_for(dataset: Any, pad: bool | str | None, target_key: TargetKey) -> tuple[Pad, torch.Tensor] | None:
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
