"""The end of a run before its last epoch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import ClassVar

from drivetrain.core.errors import Diverged
from drivetrain.core.machine import accelerators, process
from drivetrain.core.options import groups, selection
from drivetrain.core.options.allowed import FigureName
from drivetrain.core.options.horizon import run_horizon
from drivetrain.core.options.option import BuildContext, Count, Effect, NonNegative, Option, RunSpec
from drivetrain.core.options.selection import Reach
from drivetrain.core.typed import JsonObject, StateDict

logger = logging.getLogger(__name__)


class TimeToTarget:
    """Notes the first evaluation whose figure is as good as the target.

    Seconds count from the start of the process, with start-up, compiling and evaluations, as AlgoPerf's rules want it (Dahl et
    al. 2023); those of a resumed run's parts are added. Joules are of the GPUs of all ranks, where they count them themselves.
    """

    def __init__(self, reach: Reach, context: BuildContext) -> None:
        self.reach = reach
        self.update: int | None = None
        self._progress, self._parallel, self._device = context.progress, context.parallel, context.device
        self._samples: int | None = None
        self._seconds: float | None = None
        self._joules: float | None = None
        self._seconds_before = 0.0  # of the parts of the run that a resumed one follows
        self._resumed = context.resumed
        self._used_before = accelerators.used(context.device)

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Look at an evaluation. Called on all ranks with the same figures."""
        value = selection.handed_on(metrics).get(self.reach.metric)
        if self.update is not None or value is None or not self.reach.reached(value):
            return
        self.update, self._samples, self._seconds = self._progress.updates, self._progress.samples, self._elapsed()
        # The energy of the earlier parts of a resumed run is not known.
        self._joules = None if self._resumed else self._parallel.energy(self._device, self._used_before)
        logger.info("target %s reached after %s updates, %.1f s", self.reach, f"{self.update:,}", self._seconds)

    def record(self) -> JsonObject:
        """The record of it in result.json; null where the target was not reached."""
        return {
            "reach": str(self.reach),
            "update": self.update,
            "samples": self._samples,
            "seconds": self._seconds,
            "energy_joules": self._joules,
        }

    def state_dict(self) -> StateDict:
        """The state for a resumed run."""
        return {**self.record(), "elapsed": self._elapsed()}

    def load_state_dict(self, state: StateDict) -> None:
        """Load `state_dict()`. What was reached counts for the same target alone: a resumed run may have another."""
        self._seconds_before = state.get("elapsed", 0.0)
        if state.get("reach") == str(self.reach):
            self.update, self._samples, self._seconds = state["update"], state["samples"], state["seconds"]
            self._joules = state["energy_joules"]

    def _elapsed(self) -> float:
        return round(self._seconds_before + time.monotonic() - process.started, 3)


class Stop(Option, groups.Stop):
    """stop=none: the run goes to its end. With `at_target` it ends where an evaluation reaches the run's `target`.

    It has diverged where `nan_patience` evaluations in a row give no finite value of the metric that ranks models.
    """

    why_fixed: ClassVar[str] = "it looks at the evaluations of the whole run"
    effect: ClassVar[Effect] = "exact"
    key_effects: ClassVar[Mapping[str, Effect]] = {"at_target": "changes"}
    changes = "the length of the run"
    _to_target: TimeToTarget | None = None  # at the run's target

    def __init__(self, at_target: bool = False, nan_patience: Count = 3) -> None:
        self.at_target, self.nan_patience = at_target, nan_patience
        self._undefined = 0  # evaluations without a finite value of the metric that ranks models, in a row

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.at_target and run.values["target"] is None:
            yield "stop.at_target=true ends the run at its target, and target is null: set one, as 'target=accuracy>=0.98'"

    def setup(self, context: BuildContext) -> None:
        reach = Reach.parse(context.run.values["target"] or "")
        self._to_target = None if reach is None else TimeToTarget(reach, context)
        self._selected = selection.selected(context.run).name

    @property
    def reason(self) -> str | None:
        """The reason why the run has to end now; None: it continues."""
        if not (self.at_target and self._to_target and self._to_target.update):
            return None
        return f"target {self._to_target.reach} reached"

    @property
    def target(self) -> JsonObject | None:
        """The time when the run's target was reached, as result.json has it; None where the run has no target."""
        return None if self._to_target is None else self._to_target.record()

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Receive the metrics of an evaluation, which are the same on every rank. Called on all of them. Raises Diverged."""
        self._undefined = 0 if self._selected in metrics else self._undefined + 1
        if self._undefined >= self.nan_patience:
            raise Diverged(
                f"{self._selected}, which ranks the run's models, had no finite value in the last {self._undefined} evaluations "
                f"(stop.nan_patience={self.nan_patience}); the last one gave {metrics}"
            )
        if self._to_target is not None:
            self._to_target.evaluated(metrics)

    def state_dict(self) -> StateDict:
        """The state for a resumed run."""
        target = {} if self._to_target is None else {"target": self._to_target.state_dict()}
        return {"undefined": self._undefined, **target}

    def load_state_dict(self, state: StateDict) -> None:
        """Load `state_dict()`; it is empty where the run was saved under another option."""
        self._undefined = state.get("undefined", 0)
        if self._to_target is not None:
            self._to_target.load_state_dict(state.get("target", {}))


class Early(Stop):
    """Ends the run after `patience` evaluations in a row in which `metric` is not better than before by more than `min_delta`."""

    effect = "changes"
    changes = "the length of the run"
    key_effects: ClassVar[Mapping[str, Effect]] = {}

    def __init__(
        self,
        patience: Count = 3,
        min_delta: NonNegative = 0.0,
        metric: FigureName | None = None,
        at_target: bool = False,
        nan_patience: Count = 3,
    ) -> None:
        super().__init__(at_target, nan_patience)
        self.patience, self.min_delta, self.metric = patience, min_delta, metric
        self._best: float | None = None
        self._bad = 0  # evaluations without improvement, in a row

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from selection.problems(run, "stop.metric", self.metric)
        if run.values["evaluate_every"] >= run.values["epochs"]:
            yield (
                f"{run.named('stop')} looks at evaluations, and evaluate_every={run.values['evaluate_every']} leaves only that "
                f"at the end of epochs={run.values['epochs']}: lower evaluate_every, or set stop=none"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        horizon = run_horizon(run)
        epochs = run.values["epochs"] if horizon is None else horizon.epochs
        evaluations = math.ceil(epochs / run.values["evaluate_every"])
        if evaluations <= self.patience + 1:  # the first one is compared with nothing
            yield (
                f"stop.patience={self.patience} and {evaluations} evaluations in all: the run cannot end earlier; "
                "lower stop.patience or evaluate_every, or train longer"
            )
        if not run.scheduler.constant and not run.scheduler.follows_evaluations:
            yield (
                f"{run.named('stop')} may end the run before {run.named('scheduler')} has brought the learning rate to its end, "
                "where most of the gain often is: scheduler=constant and scheduler=plateau do not depend on the run's length"
            )

    def setup(self, context: BuildContext) -> None:
        super().setup(context)
        chosen = selection.selected(context.run)
        self._name = self.metric or chosen.name
        self._better = selection.evaluated(context.run)[self._name] or chosen.better

    @property
    def reason(self) -> str | None:
        if (at_target := super().reason) is not None:
            return at_target
        if self._bad < self.patience or self._best is None:
            return None
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        times = "evaluation" if self._bad == 1 else f"{self._bad} evaluations"
        return f"stop=early: {self._name} has not improved{by} in the last {times} (best: {self._best:.6g})"

    def evaluated(self, metrics: dict[str, float]) -> None:
        super().evaluated(metrics)
        value = metrics.get(self._name, math.nan)  # which is never better
        before = -math.inf if self._better(0.0, 1.0) else math.inf
        change = (value - (before if self._best is None else self._best)) * (1 if self._better(0.0, 1.0) else -1)
        if change > self.min_delta:
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self.reason is not None:
            logger.info("%s", self.reason)

    def state_dict(self) -> StateDict:
        return {**super().state_dict(), "best": self._best, "bad": self._bad}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._best, self._bad = state.get("best"), state.get("bad", 0)
