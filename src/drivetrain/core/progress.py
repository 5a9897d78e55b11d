"""Counts how far a run is. The counts are saved with its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from drivetrain.core.typed import StateDict


@dataclass
class Progress:
    """Counters of a run. Updates and samples are counted separately: a skipped update consumes its samples."""

    epoch: int = 0
    window: int = 0  # updates of this epoch so far, skipped ones included
    updates: int = 0
    samples: int = 0
    skipped: int = 0
    evaluated: int = -1  # the update of the last evaluation
    evaluation_due: bool = False  # the last update is to be evaluated still: a signal came before that was done
    final: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    ranked: dict[int, float] = field(default_factory=dict)  # update → the value of its evaluation, the best first
    tables: dict[str, Any] = field(default_factory=dict)  # of the last evaluation, as result.json has them

    @property
    def steps(self) -> int:
        """Updates, including skipped ones."""
        return self.updates + self.skipped

    def record_evaluation(
        self,
        metrics: dict[str, float],
        name: str,
        better: Callable[[float, float], float],
        tables: Mapping[str, object] | None = None,
    ) -> None:
        """Record an evaluation; `better` is min or max, and returns the better of two values of the metric `name`.

        One that gave no value of it cannot be the best.
        """
        if (value := metrics.get(name)) is not None:
            if not self.best or better(value, self.best[name]) != self.best[name]:
                self.best = {**metrics, "update": self.updates}
            values = {**self.ranked, self.updates: value}
            self.ranked = dict(sorted(values.items(), key=lambda item: item[1], reverse=better(0.0, 1.0) == 1.0))
        self.evaluated, self.final, self.tables = self.updates, metrics, dict(tables or {})

    def state_dict(self) -> StateDict:
        """Return what a resumed run needs."""
        return asdict(self)

    def load_state_dict(self, state: StateDict) -> None:
        """Load a `state_dict()`, in place."""
        vars(self).update(state)
