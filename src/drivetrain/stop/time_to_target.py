"""When a run reaches its target: after how many updates, samples and seconds, and how many joules."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from drivetrain.core import accelerators, process
from drivetrain.core.selection import Reach

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

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
        value = metrics.get(self.reach.metric)
        if self.update is not None or value is None or not self.reach.reached(value):
            return
        self.update, self._samples, self._seconds = self._progress.updates, self._progress.samples, self._elapsed()
        self._joules = self._energy()
        logger.info("target %s reached after %s updates, %.1f s", self.reach, f"{self.update:,}", self._seconds)

    def record(self) -> dict[str, Any]:
        """What result.json says of it; null where the target was not reached, or nothing tells."""
        return {
            "reach": str(self.reach),
            "update": self.update,
            "samples": self._samples,
            "seconds": self._seconds,
            "energy_joules": self._joules,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state for a resumed run."""
        return {**self.record(), "elapsed": self._elapsed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state_dict()`. What was reached counts for the same target alone: a resumed run may have another."""
        self._seconds_before = state.get("elapsed", 0.0)
        if state.get("reach") == str(self.reach):
            self.update, self._samples, self._seconds = state["update"], state["samples"], state["seconds"]
            self._joules = state["energy_joules"]

    def _elapsed(self) -> float:
        return round(self._seconds_before + time.monotonic() - process.started, 3)

    def _energy(self) -> float | None:
        """The joules since the start, of a run that was not resumed: the energy of its earlier parts is not known."""
        if self._resumed or self._device.type != "cuda" or not (self._parallel.one_process or self._parallel.distributed):
            return None
        readings = self._parallel.gather_object((self._used_before, accelerators.used(self._device)))
        if self._parallel.world.rank:
            return None
        return accelerators.total([first for first, _ in readings], [last for _, last in readings])
