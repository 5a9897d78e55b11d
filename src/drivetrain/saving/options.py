"""The options that decide when checkpoints are saved, and which are kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from drivetrain.core.options import groups
from drivetrain.core.options.option import Count, Effect, Option, Positive, RunSpec


class Saving(Option, groups.Saving):
    """saving=none: nothing is saved."""

    why_fixed: ClassVar[str] = "the checkpoints belong to one run"
    effect: ClassVar[Effect] = "exact"
    average_kept = False
    keep_recent: int | None = None
    asynchronous = False

    def restart(self, update: int) -> None:
        """Start counting updates and minutes from here."""

    def counted(self, update: int) -> bool:
        """Return whether to save after this update, within an epoch, by the number of updates: equal on all ranks."""
        return False

    def due(self) -> bool:
        """Return whether to save by this rank's clock, within an epoch."""
        return False

    def chosen(self, saved: Sequence[int], ranked: Sequence[int]) -> list[int]:
        """Return the checkpoints to keep, by their updates, in order.

        `saved` are the existing ones, the oldest first; `ranked` are the evaluated updates, the best first.
        """
        return []


class Last(Saving):
    """Saves at the end of every epoch, and every `every_updates` or `every_minutes`; keeps the newest `keep` checkpoints.

    With `sharded` every rank writes its shards (torch.distributed.checkpoint) to a shared disk: no rank holds the whole
    model, and `drivetrain export` merges the shards. `asynchronous` copies the state and writes it in a thread while
    training continues. With `average_kept` the mean of the kept checkpoints' weights is evaluated at the end of the run
    (checkpoint averaging, as in Vaswani et al. 2017) and written to averaged.safetensors. The newest `keep_recent` are kept
    in addition, as starting points of `drivetrain replay`.
    """

    effect = "exact"
    active = True

    def __init__(
        self,
        every_updates: Count | None = None,
        every_minutes: Positive | None = None,
        keep: Count = 2,
        sharded: bool = False,
        asynchronous: bool = False,
        average_kept: bool = False,
        keep_recent: Count | None = None,
    ) -> None:
        self.every_updates, self.every_minutes, self.keep = every_updates, every_minutes, keep
        self.sharded, self.asynchronous, self.average_kept = sharded, asynchronous, average_kept
        self.keep_recent = keep_recent

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.keep_recent is not None and not self.best and self.keep_recent <= self.keep:
            yield (
                f"saving.keep_recent={self.keep_recent} has no effect: {run.named('saving')} keeps the newest "
                f"keep={self.keep} already: leave it out"
            )

    def restart(self, update: int) -> None:
        self._update, self._time = update, time.monotonic()

    def counted(self, update: int) -> bool:
        return self.every_updates is not None and update - self._update >= self.every_updates

    def due(self) -> bool:
        return self.every_minutes is not None and time.monotonic() - self._time >= 60 * self.every_minutes

    def chosen(self, saved: Sequence[int], ranked: Sequence[int]) -> list[int]:
        return list(saved[-self.keep :])


class Best(Last):
    """Saves like saving=last; keeps the `keep` checkpoints with the best evaluations, and the newest one to resume from.

    At the end of the run the best one is loaded and evaluated.
    """

    effect = "exact"
    best = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.values["evaluate_every"] > run.values["epochs"]:
            yield (
                f"{run.named('saving')} picks by evaluations, but evaluate_every={run.values['evaluate_every']} is beyond "
                f"epochs={run.values['epochs']}: lower evaluate_every or set saving=last"
            )

    def chosen(self, saved: Sequence[int], ranked: Sequence[int]) -> list[int]:
        return sorted([update for update in ranked if update in saved][: self.keep])
