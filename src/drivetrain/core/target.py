"""A value of a metric that a run is to reach, such as accuracy>=0.98."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from drivetrain.core import selection
from drivetrain.core.option import RunSpec

PATTERN = r"([A-Za-z][\w.@/-]{0,60})(>=|<=)([-+]?\d[\d.eE+-]{0,30})"


class Reach(NamedTuple):
    """A value of a metric to reach, such as accuracy>=0.98."""

    metric: str
    more: bool  # higher is better
    value: float

    @classmethod
    def parse(cls, text: str) -> Reach | None:
        """The target that a text names; None where it names none."""
        match = re.fullmatch(PATTERN, text)
        try:
            value = float(match[3]) if match else math.nan
        except ValueError:
            return None
        return cls(match[1], match[2] == ">=", value) if match and math.isfinite(value) else None

    def reached(self, value: float) -> bool:
        """Whether a value of the metric is as good."""
        return value >= self.value if self.more else value <= self.value

    @property
    def turned(self) -> Reach:
        """The same value, approached from the other side."""
        return self._replace(more=not self.more)

    def __str__(self) -> str:
        return f"{self.metric}{'>=' if self.more else '<='}{self.value:g}"


def problems(run: RunSpec) -> Iterator[str]:
    """Yield why the run's `target` is none: it cannot be read, is not evaluated, or asks for a worse value."""
    return problems_of(run, run.values["target"])


def problems_of(run: RunSpec, given: str | None) -> Iterator[str]:
    """Yield why this text is no target of the run."""
    if given is None:
        return
    reach = Reach.parse(given)
    if reach is None:
        yield (
            f"target={given}: give a metric and a value, as 'target=accuracy>=0.98' or 'target=loss<=0.1', in quotes, as a shell "
            "takes < and > for redirections"
        )
        return
    yield from selection.problems(run, "target", reach.metric)
    better = selection.evaluated(run).get(reach.metric)
    if better is not None and reach.more != (better(0.0, 1.0) == 1.0):
        yield f"target={given}: {'higher' if better is max else 'lower'} {reach.metric} is better: set 'target={reach.turned}'"
