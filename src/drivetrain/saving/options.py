"""When a run's state is saved, and which saves are kept."""

from __future__ import annotations

import time
from collections.abc import Iterator

from drivetrain.core.option import Count, Option, Positive, RunSpec


class Saving(Option):
    """saving=none: nothing is saved."""

    active = False
    keep_best = False
    sharded = False
    asynchronous = False
    keep = 0

    def start(self, update: int) -> None:
        """Count from here."""

    def due(self, update: int) -> bool:
        """Whether the state is to be saved after this update, within an epoch."""
        return False


class Last(Saving):
    """The newest states: at the end of every epoch, and every so many updates or minutes.

    `sharded` lets every rank write its part (torch.distributed.checkpoint), onto a disk that all of them share: nobody holds
    the whole model, and `drivetrain export` puts it together. `asynchronous` copies the state and writes it beside the
    training.
    """

    active = True

    def __init__(
        self,
        every_updates: Count | None = None,
        every_minutes: Positive | None = None,
        keep: Count = 2,
        sharded: bool = False,
        asynchronous: bool = False,
    ) -> None:
        self.every_updates, self.every_minutes, self.keep = every_updates, every_minutes, keep
        self.sharded, self.asynchronous = sharded, asynchronous

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.sharded and not run.parallel.portable_shards:
            yield (
                f"saving.sharded=true and {run.named('parallel')}: no other strategy can read "
                "the parts that its ranks hold: set saving.sharded=false, or parallel=fsdp"
            )

    def start(self, update: int) -> None:
        self._update, self._time = update, time.monotonic()

    def due(self, update: int) -> bool:
        by_count = self.every_updates is not None and update - self._update >= self.every_updates
        by_clock = self.every_minutes is not None and time.monotonic() - self._time >= 60 * self.every_minutes
        return by_count or by_clock


class Best(Last):
    """As saving=last, and the state with the best evaluation besides."""

    keep_best = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.values["evaluate_every"] > run.values["epochs"]:
            yield (
                f"{run.named('saving')} picks by evaluations, but evaluate_every={run.values['evaluate_every']} is beyond "
                f"epochs={run.values['epochs']}: lower evaluate_every or set saving=last"
            )
