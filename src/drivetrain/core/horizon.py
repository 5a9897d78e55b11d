"""How many updates make the run, and lengths such as 500 updates, 5ep or a share of the run."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from drivetrain.core.option import Length, RunSpec

_EPOCHS = re.compile(r"(\d+(?:\.\d+)?)ep")


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


def horizon(run: RunSpec, samples: int | None = None, batch: Any = None) -> Horizon | None:
    """The horizon of a run over so many training samples; None where the data must be read first, or gives no update.

    `batch` is the batch option as it was built over the data, where it has been.
    """
    samples = run.data.train_samples() if samples is None else samples
    epochs, batch, drop_last = run.values["epochs"], batch or run.batch, run.data.drop_last
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
