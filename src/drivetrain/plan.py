"""How many updates make the run, and which samples make which micro-batch of which update."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

from drivetrain.lazy import torch
from drivetrain.spec import Length, Run

_EPOCHS = re.compile(r"(\d+(?:\.\d+)?)ep")


class World(NamedTuple):
    """This process among the ranks of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


@dataclass(slots=True)
class Request:
    """One micro-batch still to be fetched."""

    epoch: int
    indices: torch.Tensor  # (n,) int64
    weight: torch.Tensor  # 0-d; 1 in evaluation
    last: bool = True  # the update's last micro-batch
    epoch_end: bool = False  # the epoch's last micro-batch
    partners: torch.Tensor | None = None  # (n,) samples to mix with, where an augmentation mixes
    # Known once it has been read, by a reader that can tell:
    seconds: float | None = None  # of reading, decoding and augmenting
    ready: float = 0.0  # time.perf_counter() when that was done, which all processes share

    def rows(self) -> torch.Tensor:
        """The samples to read: `indices`, then those partners that are not among them."""
        if self.partners is None:
            return self.indices
        return torch.cat([self.indices, self.partners[~torch.isin(self.partners, self.indices)]])


@dataclass(slots=True)
class Micro:
    """One micro-batch on the device. `weight` is its share of the update's samples, times the ranks (which average)."""

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    last: bool
    epoch_end: bool
    seconds: float | None = None  # as in its request
    ready: float = 0.0


class Horizon(NamedTuple):
    """How long a run is, in updates. Epochs get shorter where the batch grows."""

    updates: int  # of the whole run
    ends: Sequence[int]  # updates made when each epoch ends

    def of(self, length: Length) -> float:
        """A length that `length_problem` has nothing against, in updates from the start of the run, not rounded."""
        if isinstance(length, str):
            return self._after(float(length.removesuffix("ep")))
        return length * self.updates if length < 1 else length

    def of_end(self, length: Length) -> float:
        """A length that ends with the run, in updates."""
        if not isinstance(length, str):
            return self.of(length)
        return self.updates - self._after(max(0.0, self.epochs - float(length.removesuffix("ep"))))

    @property
    def epochs(self) -> float:
        """How many epochs the run's updates are."""
        last = min(bisect_left(self.ends, self.updates), len(self.ends) - 1)
        begin = self.ends[last - 1] if last else 0
        return last + (self.updates - begin) / (self.ends[last] - begin)

    def _after(self, epochs: float) -> float:
        """Updates made after so many epochs; past the end all are as long as the last."""
        whole = min(int(epochs), len(self.ends) - 1)
        begin = self.ends[whole - 1] if whole else 0
        return begin + (epochs - whole) * (self.ends[whole] - begin)

    def at_most(self, updates: int | None) -> Horizon:
        """The horizon of a run that is stopped after so many updates."""
        return self if updates is None else self._replace(updates=min(updates, self.updates))


def horizon(run: Run, samples: int | None = None) -> Horizon | None:
    """The horizon of a run over so many training samples; None where the data must be read to tell, or gives no update."""
    samples = run.data.train_samples() if samples is None else samples
    epochs, batch, drop_last = run.values["epochs"], run.batch, run.data.drop_last
    if not samples or not batch.total_updates(samples, epochs, drop_last):
        return None
    first, last = batch.updates(samples, 0, drop_last), batch.updates(samples, epochs - 1, drop_last)
    ends: Sequence[int] = range(first, first * epochs + 1, first)
    if first != last:
        ends = list(accumulate(batch.updates(samples, epoch, drop_last) for epoch in range(epochs)))
    return Horizon(ends[-1], ends).at_most(run.values["updates"])


def length_problem(knob: str, length: Length) -> Iterator[str]:
    """What is wrong with a length, if anything."""
    if isinstance(length, str):
        good = _EPOCHS.fullmatch(length) is not None
    else:
        good = 0 <= length < 1 or (length >= 1 and length == int(length))
    if not good:
        yield f"{knob}={length} is no length: give a share of the run below 1 (0.1), updates (500) or epochs (5ep)"


Part = TypeVar("Part", Request, Micro)


def one_update(parts: Iterator[Part]) -> Iterator[Part]:
    """The next update's parts of a longer stream. When it ends, that update is made: the loop has come for more."""
    for part in parts:
        yield part
        if part.last:
            return
