"""The metric that ranks models: for the best checkpoint, a plateau, early stopping, sweeps and verdicts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from drivetrain.core.errors import did_you_mean
from drivetrain.core.options.groups import Better
from drivetrain.core.options.run_spec import RunSpec

AVERAGED = "ema_"
SETS = ("validation", "test")
REPEATS = ("runtime.seed", "data.fold")  # keys in which runs of one config differ: their results have a mean and a deviation


class Figure(NamedTuple):
    """The name of a figure in parts. Its text form is used in records, results and settings."""

    metric: str
    averaged: bool = False  # of the averaged weights
    set: str = ""  # one of several named sets; "" where there is one set

    @classmethod
    def parse(cls, name: str) -> Figure:
        """The figure of a name."""
        of_set, _, rest = name.rpartition("/")
        return cls(rest.removeprefix(AVERAGED), rest.startswith(AVERAGED), of_set)

    def __str__(self) -> str:
        return f"{self.set}/{self.of_weights}" if self.set else self.of_weights

    def on_all_sets(self, names: Iterable[str]) -> dict[str, str]:
        """The figures equal to this one except for the set, by the set's name."""
        return {figure.set: name for name in names if (figure := Figure.parse(name))[:2] == self[:2]}

    @property
    def of_weights(self) -> str:
        """Its name without the set."""
        return f"{AVERAGED}{self.metric}" if self.averaged else self.metric


def handed_on(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures of the weights that a run delivers: with an average the average's, also under the plain names."""
    averaged = {name: str(Figure.parse(name)._replace(averaged=True)) for name in figures}
    return {name: figures.get(averaged[name], value) for name, value in figures.items()}


class Selection(NamedTuple):
    """The metric that ranks models, and the function that picks the better of two of its values."""

    name: str
    better: Better

    @property
    def maximize(self) -> bool:
        """True if higher is better."""
        return self.better(0.0, 1.0) == 1.0

    def record(self) -> dict[str, str]:
        """Return its form in files."""
        return {"metric": self.name, "better": "max" if self.maximize else "min"}

    @classmethod
    def of(cls, recorded: Mapping[str, object] | None) -> Selection | None:
        """The selection of a record; None where it names no metric."""
        name = (recorded or {}).get("metric")
        return cls(str(name), max if (recorded or {}).get("better") == "max" else min) if name is not None else None

    @property
    def across_runs(self) -> Selection:
        """The same metric for runs with and without an average: of `handed_on` figures."""
        return self._replace(name=str(Figure.parse(self.name)._replace(averaged=False)))

    def place(self, figures: Mapping[str, float]) -> tuple[float, float] | None:
        """The place of an evaluation, lowest is best: by the metric, and at a tie by the loss. None: no place."""
        value = figures.get(self.name)
        loss = figures.get(str(Figure.parse(self.name)._replace(metric="loss")), math.inf)
        return (-value if self.maximize else value, loss) if value is not None and math.isfinite(value) else None

    def value(self, place: tuple[float, float]) -> float:
        """The metric's value at a place."""
        return -place[0] if self.maximize else place[0]


def evaluated(run: RunSpec) -> dict[str, Better | None]:
    """Return the figures that an evaluation of the run reports, and which of two values is better; None: neither is."""
    name, better = run.loss.best
    found: dict[str, Better | None] = {metric: better if metric == name else min for metric in run.loss.metrics}
    for metric in run.parts.get("metrics", []):
        found |= metric.directions
    weights = (False, True) if run.ema.active else (False,)
    return {str(Figure(m, averaged, s)): found[m] for s in run.data.judging_sets() for averaged in weights for m in found}


def chosen(run: RunSpec) -> str | None:
    """Return the figure named by `select`; without a set in the name it is the first set's."""
    name: str | None = run.values.get("select")
    of_first = None if name is None or "/" in name else str(Figure.parse(name)._replace(set=run.data.judging_sets()[0]))
    return of_first if of_first in evaluated(run) else name


def selected(run: RunSpec) -> Selection:
    """Return the metric that ranks the run's models: `select`, or else the loss's own, on the first set.

    It refers to the weights that the run delivers: their average, if the run keeps one.
    """
    name = chosen(run)
    better = evaluated(run)[name] if name is not None else None
    if name is None or better is None:
        metric, better = run.loss.best
        name = str(Figure(metric, set=run.data.judging_sets()[0]))
    return Selection(str(Figure.parse(name)._replace(averaged=True)) if run.ema.active else name, better)


def problems(run: RunSpec, setting: str, name: str | None) -> Iterator[str]:
    """Yield why a metric cannot rank models: it is not evaluated, or has no better direction."""
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


PATTERN = r"([A-Za-z][\w.@/-]{0,60})(>=|<=)([-+]?\d[\d.eE+-]{0,30})"


class Reach(NamedTuple):
    """A value of a metric to reach, such as accuracy>=0.98."""

    metric: str
    more: bool  # higher is better
    value: float

    @classmethod
    def parse(cls, text: str) -> Reach | None:
        """The target in a text; None for another text."""
        match = re.fullmatch(PATTERN, text)
        try:
            value = float(match[3]) if match else math.nan
        except ValueError:
            return None
        return cls(match[1], match[2] == ">=", value) if match and math.isfinite(value) else None

    def reached(self, value: float) -> bool:
        """True if a value of the metric reaches it."""
        return value >= self.value if self.more else value <= self.value

    @property
    def turned(self) -> Reach:
        """The same value, approached from the other side."""
        return self._replace(more=not self.more)

    def __str__(self) -> str:
        return f"{self.metric}{'>=' if self.more else '<='}{self.value:g}"


def target_problems(run: RunSpec) -> Iterator[str]:
    """Yield why the run's `target` is invalid: it cannot be read, is not evaluated, or has the wrong direction."""
    return problems_of(run, run.values["target"])


def problems_of(run: RunSpec, given: str | None) -> Iterator[str]:
    """Yield why this text is not a target for the run."""
    if given is None:
        return
    reach = Reach.parse(given)
    if reach is None:
        yield (
            f"target={given}: give a metric and a value, as 'target=accuracy>=0.98' or 'target=loss<=0.1', in quotes, as a shell "
            "takes < and > for redirections"
        )
        return
    yield from problems(run, "target", reach.metric)
    better = evaluated(run).get(reach.metric)
    if better is not None and reach.more != (better(0.0, 1.0) == 1.0):
        yield f"target={given}: {'higher' if better is max else 'lower'} {reach.metric} is better: set 'target={reach.turned}'"
