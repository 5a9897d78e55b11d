"""What the figures of an evaluation are called: accuracy, ema_accuracy of averaged weights, noisy/accuracy of a named set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

AVERAGED = "ema_"


class Figure(NamedTuple):
    """The name of a figure in parts. As a text it is that of records, results and settings."""

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
        """Those of some figures that are the same on any set, by the name of the set."""
        return {figure.set: name for name in names if (figure := Figure.parse(name))[:2] == self[:2]}

    @property
    def of_weights(self) -> str:
        """Its name on a set that is known."""
        return f"{AVERAGED}{self.metric}" if self.averaged else self.metric
