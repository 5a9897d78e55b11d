"""How far a run is: what it counts, and saves with its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Progress:
    """How far the run is. Updates and consumed samples are counted apart: a skipped update consumes its samples."""

    epoch: int = 0
    window: int = 0  # updates' worth of samples consumed in this epoch
    updates: int = 0
    samples: int = 0
    skipped: int = 0
    evaluated: int = -1  # the update of the last evaluation
    final: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Updates, those that were skipped included."""
        return self.updates + self.skipped

    def record_evaluation(self, metrics: dict[str, float], name: str, better: Callable[[float, float], float]) -> None:
        """Take in an evaluation; `better` is min or max, the better of two values of the metric `name`."""
        if not self.best or better(metrics[name], self.best[name]) != self.best[name]:
            self.best = {**metrics, "update": self.updates}
        self.evaluated, self.final = self.updates, metrics

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take `state_dict()` back, in place."""
        vars(self).update(state)
