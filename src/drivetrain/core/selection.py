"""Which metric ranks models: for the best checkpoint, a plateau, early stopping, sweeps and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from drivetrain.core.errors import did_you_mean
from drivetrain.core.figure import Figure
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

    def record(self) -> dict[str, str]:
        """Return it as it is written to files."""
        return {"metric": self.name, "better": "max" if self.maximize else "min"}


def evaluated(run: RunSpec) -> dict[str, Better | None]:
    """Return the figures that an evaluation of the run reports, and which of two values is better; None: neither is."""
    name, better = run.loss.best
    found: dict[str, Better | None] = {metric: better if metric == name else min for metric in run.loss.metrics}
    for metric in run.parts.get("metrics", []):
        found |= metric.directions
    weights = (False, True) if run.ema.active else (False,)
    return {str(Figure(m, averaged, s)): found[m] for s in run.data.judging_sets() for averaged in weights for m in found}


def selected(run: RunSpec) -> Selection:
    """Return the metric that ranks the run's models: `select`, or else the one that its loss names, of the first set."""
    name = run.values.get("select")
    better = evaluated(run)[name] if name is not None else None
    if name is not None and better is not None:
        return Selection(name, better)
    name, better = run.loss.best
    return Selection(str(Figure(name, set=run.data.judging_sets()[0])), better)


def problems(run: RunSpec, setting: str, name: str | None) -> Iterator[str]:
    """Yield why a metric cannot rank models: it is not evaluated, or neither a high nor a low value of it is better."""
    found = evaluated(run)
    directed = [metric for metric, better in found.items() if better is not None]
    if name is None or found.get(name) is not None:
        return
    of = Figure.parse(name)
    if name in found:
        yield (
            f"{setting}={name}: neither a high nor a low {name} is known to be better, so it cannot rank models: "
            f"set it to one of {', '.join(directed)}"
        )
    elif of.averaged and str(of._replace(averaged=False)) in found:
        yield f"{setting}={name} is of averaged weights, and {run.named('ema')} keeps none: set ema=ema"
    elif str(of._replace(set=run.data.judging_sets()[0])) in found:
        sets = run.data.judging_sets()
        words = "one set, which has no name" if list(sets) == [""] else f"the sets {', '.join(sets)}"
        named = ", ".join(str(of._replace(set=each)) for each in sets)
        yield f"{setting}={name} is not evaluated: models are selected by {words}: set it to one of {named}"
    else:
        yield f"{setting}={name} is not evaluated: {did_you_mean(name, directed)} (metrics=[…] adds others)"
