"""Calls the user's callbacks at the events of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.config.callbacks import Told, load
from drivetrain.core.errors import CallbackError
from drivetrain.core.step.step import Step, WrappingStep
from drivetrain.core.typed import JsonMapping
from drivetrain.core.user.callback import AVERAGE, PLAIN, Event
from drivetrain.engine.context import RunContext
from drivetrain.engine.training_log import TrainingLog

logger = logging.getLogger(__name__)


@dataclass
class Callbacks:
    """Calls each callback of a run, on rank 0, until one of them fails. As a log writer it gets the run's records."""

    named: dict[str, Told]  # empty on all ranks but 0
    context: RunContext
    records: TrainingLog
    error: CallbackError | None = None  # ends the run, once it is saved
    started: bool = field(default=False, init=False)  # measurements build a trainer without starting its run

    @classmethod
    def build(
        cls,
        context: RunContext,
        log: TrainingLog,
        before: Callbacks | None = None,
    ) -> Callbacks:
        """Make the callbacks of a run, or continue those of its stage `before`. Raises UserError."""
        if before is not None:
            before.records = log
            return before
        names = context.run.values["callbacks"] if context.world.rank == 0 else []
        return cls({name: load(name) for name in names}, context, log)

    def wrap_step(self, step: Step) -> Step:
        """Return a step that calls the callbacks for every update, if any are."""
        if any(callback.every_update for callback in self.named.values()):
            return CallbackStep(step, lambda: self._tell("update", {}, every_update=True))
        return step

    def start(self) -> None:
        """The run begins. Raises CallbackError: nothing is lost yet."""
        self.started = True
        self._tell("start")
        self.raise_error()

    def log(self, record: JsonMapping) -> None:
        """Report a training record or an evaluation."""
        figures = {k: v for k, v in record.items() if k not in ("event", "update", "epoch", "time", "set")}
        if record["event"] == "train":
            self._tell("update", figures, every_update=False)
        elif record["event"] == "evaluate" and "weights" not in record:  # without the run's end, which selects nothing
            self._tell("evaluation", figures)

    def save(self) -> None:
        """A checkpoint was saved."""
        self._tell("save")

    def log_image(self, name: str, update: int, path: Path) -> None:
        """Callbacks get no pictures."""

    def close(self, status: str) -> None:
        """Nothing: callbacks learn of the end by `end`."""

    def end(self, status: str) -> None:
        """The run ended. The first exception of the run's callbacks stays in `error`."""
        if self.started and self.error is None:
            self._tell("end", status=status)

    def raise_error(self) -> None:
        """Raise the error of the callback that failed, if there is one."""
        if self.error is not None:
            raise self.error

    def _tell(
        self, name: str, metrics: Mapping[str, object] | None = None, every_update: bool | None = None, status: str = "running"
    ) -> None:
        """Call the callbacks for an event; where `every_update` is not None, only the callbacks with this value."""
        if not self.named or not self.started or self.error is not None:
            return
        progress = self.context.progress
        event = Event(
            self.context.run_dir, self.context.config, progress.updates, progress.epoch, progress.samples,
            dict(progress.final if metrics is None else metrics), dict(progress.best), status,
            weights=(PLAIN, AVERAGE) if self.context.run.ema.active else (PLAIN,), eval_model=self.context.eval_model,
            log=lambda figures: self.records.write("callback", **figures),
            log_image=self.records.image,
        )  # fmt: skip
        for given, callback in self.named.items():
            if every_update not in (None, callback.every_update):
                continue
            try:
                callback.tell(name, event, self.context.model)
            except (Exception, SystemExit) as error:
                said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                self.error = CallbackError(f"callbacks=[{given}] failed in {name}, after update {progress.updates}: {said}")
                self.error.__cause__ = error
                return


@dataclass(eq=False)
class CallbackStep(WrappingStep):
    """A step that reports each update while its gradients still exist."""

    tell: Callable[[], None]
    made: bool = False  # the update was not skipped

    def update(self) -> bool:
        self.made = bool(self.inner.update())
        return self.made

    def zero_grad(self) -> None:
        if self.made:
            self.tell()
        self.inner.zero_grad()
