"""Which metric ranks models: for the best checkpoint, a plateau, early stopping, sweeps and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from drivetrain.core.option import RunSpec

Better = Callable[[float, float], float]  # min or max: returns the better of two values


class Selection(NamedTuple):
    """The metric that ranks models, and the function that picks the better of two of its values."""

    name: str
    better: Better

    @property
    def maximize(self) -> bool:
        """Whether higher is better."""
        return self.better(0.0, 1.0) == 1.0


def evaluated(run: RunSpec) -> dict[str, Better | None]:
    """Return the metrics that an evaluation of the run reports, and which of two values is better; None: neither is."""
    name, better = run.loss.best
    found: dict[str, Better | None] = {metric: better if metric == name else min for metric in run.loss.metrics}
    for metric in run.parts.get("metrics", []):
        found |= metric.directions
    return found


def selected(run: RunSpec) -> Selection:
    """Return the metric that ranks the run's models: `select`, or else the one that its loss names."""
    if (name := run.values.get("select")) is not None and (better := evaluated(run).get(name)) is not None:
        return Selection(name, better)
    return Selection(*run.loss.best)
