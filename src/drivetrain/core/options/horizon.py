"""The number of updates of a run; lengths such as 500 updates, 5 epochs ("5ep") or a share of the run."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from drivetrain.core.options.allowed import Length
from drivetrain.core.options.groups import Batch
from drivetrain.core.options.run_spec import RunSpec
from drivetrain.core.typed import JsonObject, StateDict

LONGEST = 10**15  # updates or epochs: beyond any run, and exact as a float
_EPOCHS = re.compile(r"(\d+(?:\.\d+)?)ep")


class Horizon(NamedTuple):
    """The length of a run in updates. Its epochs have fewer updates where the batch grows."""

    updates: int  # of the whole run
    ends: Sequence[int]  # the number of updates made when each epoch ends

    def in_updates(self, length: Length) -> float:
        """A length in updates, counted from the start of the run and not rounded. `length_problem` must accept it."""
        if isinstance(length, str):
            return self._updates_after(float(length.removesuffix("ep")))
        return length * self.updates if length < 1 else length

    def in_updates_at_end(self, length: Length) -> float:
        """A length in updates, counted back from the end of the run: its last epochs may have fewer updates."""
        if not isinstance(length, str):
            return self.in_updates(length)
        return self.updates - self._updates_after(max(0.0, self.epochs - float(length.removesuffix("ep"))))

    @property
    def epochs(self) -> float:
        """The number of epochs that the run's updates make."""
        last = min(bisect_left(self.ends, self.updates), len(self.ends) - 1)
        begin = self.ends[last - 1] if last else 0
        return last + (self.updates - begin) / (self.ends[last] - begin)

    def _updates_after(self, epochs: float) -> float:
        """The number of updates made after some epochs. Epochs after the end of the run are as long as the last one."""
        whole = min(int(epochs), len(self.ends) - 1)
        begin = self.ends[whole - 1] if whole else 0
        return begin + (epochs - whole) * (self.ends[whole] - begin)

    def at_most(self, updates: int | None) -> Horizon:
        """The horizon of a run that stops after at most `updates`; None: no limit."""
        return self if updates is None else self._replace(updates=min(updates, self.updates))


def run_horizon(run: RunSpec, samples: int | None = None, batch: Batch | None = None) -> Horizon | None:
    """The horizon of a run over `samples` training samples; None where the data must be read first, or fills no update.

    `batch` is the batch option built over the data, if there is one.
    """
    samples = run.data.train_samples() if samples is None else samples
    epochs, batch, drop_last = run.values["epochs"], batch or run.batch, run.data.drop_last
    if not samples or not batch.total_updates(samples, epochs, drop_last):
        return None
    first, stretches = batch.updates(samples, 0, drop_last), batch.stretches(epochs)
    ends: Sequence[int] = range(first, first * epochs + 1, first)
    if any(batch.updates(samples, stretch.start, drop_last) != first for stretch in stretches):
        ends = []
        for stretch in stretches:
            each, begin = batch.updates(samples, stretch.start, drop_last), ends[-1] if ends else 0
            ends.extend(range(begin + each, begin + each * len(stretch) + 1, each))
    return Horizon(ends[-1], ends).at_most(run.values["updates"])


def length_problem(key: str, length: Length) -> Iterator[str]:
    """A problem if the value of `key` is not a length."""
    if isinstance(length, str):
        good = _EPOCHS.fullmatch(length) is not None and float(length.removesuffix("ep")) <= LONGEST
    else:
        good = 0 <= length < 1 or (1 <= length <= LONGEST and length == int(length))
    if not good:
        shown = length if len(str(length)) < 40 else f"{str(length)[:40]}…"
        yield f"{key}={shown} is no length: give a share of the run below 1 (0.1), updates (500) or epochs (5ep)"


@dataclass
class Progress:
    """Counters of a run. Updates and samples are counted separately: a skipped update consumes its samples."""

    epoch: int = 0
    window: int = 0  # updates of this epoch so far, skipped ones included
    updates: int = 0
    samples: int = 0
    skipped: int = 0
    evaluated: int = -1  # the update of the last evaluation
    evaluation_due: bool = False  # the last update is not yet evaluated: a signal came before
    final: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    ranked: dict[int, tuple[float, float]] = field(default_factory=dict)  # update → its evaluation's place, the best first
    tables: JsonObject = field(default_factory=dict)  # of the last evaluation, as result.json has them

    @property
    def steps(self) -> int:
        """Updates, including skipped ones."""
        return self.updates + self.skipped

    def record_evaluation(
        self, metrics: dict[str, float], place: tuple[float, float] | None, tables: Mapping[str, object] | None = None
    ) -> None:
        """Record an evaluation and its place among the others; the lowest place is the best.

        One without a place cannot be the best.
        """
        if place is not None:
            if all(place < other for other in self.ranked.values()):
                self.best = {**metrics, "update": self.updates}
            self.ranked = dict(sorted({**self.ranked, self.updates: place}.items(), key=lambda item: item[1]))
        self.evaluated, self.final, self.tables = self.updates, metrics, dict(tables or {})

    def state_dict(self) -> StateDict:
        """Return the state for a resumed run."""
        return asdict(self)

    def load_state_dict(self, state: StateDict) -> None:
        """Load a `state_dict()`, in place."""
        vars(self).update(state)
