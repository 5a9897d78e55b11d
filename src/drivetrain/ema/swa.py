"""ema=swa: the mean of the weights of the last part of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drivetrain.core import horizon as horizons
from drivetrain.core.lazy import torch
from drivetrain.core.option import CountOrZero, Length, RunSpec
from drivetrain.ema.base import Kept

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Swa(Kept):
    """Stochastic weight averaging (Izmailov et al. 2018): average ← average + (weights - average) / (n + 1), after n weights.

    It averages from `start` on, once in `every`. It equals torch.optim.swa_utils.AveragedModel with averaged buffers, and
    `update_bn` before it is evaluated or saved: the means of BatchNorm's statistics are not those of the mean weights. Whether
    an update's weights count depends on the number of updates alone, so that a resumed run averages the same ones.
    """

    effect = "changes"

    def __init__(self, start: Length = 0.75, every: Length = "1ep", statistics_updates: CountOrZero = 20) -> None:
        self.start, self.every, self.statistics_updates = start, every, statistics_updates

    def validate(self, run: RunSpec) -> Iterator[str]:
        wrong = [*horizons.length_problem("ema.start", self.start), *horizons.length_problem("ema.every", self.every)]
        yield from wrong
        horizon = horizons.run_horizon(run)
        if wrong or horizon is None:
            return
        if (start := horizon.in_updates(self.start)) >= horizon.updates:
            yield (
                f"ema.start={self.start} is update {start:g}, and the run ends with update {horizon.updates}, so that nothing "
                "would be averaged: set ema.start=0.75"
            )

    def setup(self, context: BuildContext) -> None:
        from drivetrain.ema.norm_statistics import NormStatistics  # imports torch

        super().setup(context)
        horizon, self._progress = context.horizon, context.progress
        self._start, self._end = horizon.in_updates(self.start), horizon.updates
        self._every = max(1, round(horizon.in_updates_at_end(self.every)))
        self._statistics = NormStatistics(context, self.statistics_updates) if self.statistics_updates else None
        kept = dict(zip(self._names, self._mean + self._copied, strict=True))
        self._of_norms = [(buffer, kept[name]) for name, buffer in self._statistics.buffers()] if self._statistics else []
        self.stale = False  # whether the norms' statistics are those of another average

    @property
    def started(self) -> bool:  # type: ignore[override]
        """Whether weights have been averaged: until then the average is the weights as they are."""
        return self._updates > 0

    def update(self) -> None:
        at = self._progress.updates
        if at <= self._start or (self._end - at) % self._every:
            return
        super().update()
        self._move(self._mean, 1 / self._updates)  # the first weights are taken as they are
        self._copy_buffers()
        self.stale = True

    @contextmanager
    def swapped(self) -> Iterator[None]:
        if not self.started:
            torch._foreach_copy_(self._mean + self._copied, self._live + self._live_copied)
        with super().swapped():
            if self.stale and self._statistics is not None:
                self._statistics.estimate()
                for buffer, kept in self._of_norms:
                    kept.copy_(buffer)
            self.stale = False
            yield

    def state_dict(self) -> dict[str, Any]:
        if self.stale or not self.started:
            with self.swapped():
                pass
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.stale = False  # what was saved has the statistics of its average
