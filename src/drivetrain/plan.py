"""How many updates make the run, and which samples make which micro-batch of which update."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(slots=True)
class Micro:
    """One micro-batch on the device. `weight` is its share of the update's samples, times the ranks (which average)."""

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    last: bool
    epoch_end: bool


class Horizon(NamedTuple):
    """How long a run is, in updates."""

    updates: int  # of the whole run
    per_epoch: int

    def of(self, length: Length) -> float:
        """A length that `length_problem` has nothing against, in updates; shares and epochs are not rounded."""
        if isinstance(length, str):
            return float(length.removesuffix("ep")) * self.per_epoch
        return length * self.updates if length < 1 else length

    def at_most(self, updates: int | None) -> Horizon:
        """The horizon of a run that is stopped after so many updates."""
        return self if updates is None else self._replace(updates=min(updates, self.updates))


def horizon(run: Run, samples: int | None = None) -> Horizon | None:
    """The horizon of a run over so many training samples; None where the data must be read to tell, or gives no update."""
    samples = run.data.train_samples() if samples is None else samples
    per_epoch = run.batch.updates_per_epoch(samples, run.data.drop_last) if samples else 0
    if per_epoch == 0:
        return None
    return Horizon(per_epoch * run.values["epochs"], per_epoch).at_most(run.values["updates"])


def length_problem(knob: str, length: Length) -> Iterator[str]:
    """What is wrong with a length, if anything."""
    if isinstance(length, str):
        good = _EPOCHS.fullmatch(length) is not None
    else:
        good = 0 <= length < 1 or (length >= 1 and length == int(length))
    if not good:
        yield f"{knob}={length} is no length: give a share of the run below 1 (0.1), updates (500) or epochs (5ep)"
