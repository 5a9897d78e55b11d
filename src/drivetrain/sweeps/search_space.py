"""The axes of a search, from Hydra's sweep grammar: the values that each override may take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of, parse_each

MAX_VALUES = 100_000  # of a key that is searched over


@dataclass
class Axis:
    """A key and its possible values: those listed, or numbers from `low` to `high`, both included."""

    key: str
    values: list[str] | None = None  # as in an override
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False  # whole numbers only

    def distribution(self) -> Any:
        """The axis as an optuna distribution."""
        from optuna import distributions as d

        if self.values is not None:
            return d.CategoricalDistribution(self.values)
        if self.whole:
            return d.IntDistribution(int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        return d.FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def listed(self) -> list[Any] | None:
        """All the values, as optuna proposes them; None where there are infinitely many."""
        if self.values is not None:
            return list(self.values)
        if self.step is None and not self.whole:
            return None
        step = self.step or 1
        numbers = [self.low + n * step for n in range(math.floor((self.high - self.low) / step + 1e-9) + 1)]
        return [int(n) for n in numbers] if self.whole else numbers

    def examples(self) -> list[Any]:
        """Values to validate a config with: all listed ones, or one in the middle of an interval."""
        if self.values is not None:
            return list(self.values)
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return [round(middle)] if self.whole else [middle]

    def override(self, value: Any) -> str:
        """The override that sets this value, with at most six significant digits."""
        return f"{self.key}={float(f'{value:.6g}') if isinstance(value, float) else value}"


def read(overrides: Sequence[str]) -> list[str | Axis]:
    """Each override as it is, or as an axis if it has several values. Raises UserError with every problem."""
    found: list[str | Axis] = []
    problems: list[str] = []
    for text, override in parse_each(overrides, "key=value, key=a,b or key=interval(a,b)", problems):
        if not override.is_sweep_override():
            found.append(text)
            continue
        axis = _axis(override)
        if wrong := list(_problems(text, override, axis)):
            problems += wrong
        else:
            found.append(axis)
    axes = [a.key for a in found if isinstance(a, Axis)]
    if not axes and not problems:
        problems.append(
            "hydra/sweeper=optuna has nothing to search: give a key several values, as optimizer.lr=interval(1e-4,1e-1)"
        )
    keys = [key_of(override) for override in overrides]
    problems += [f"{key} is searched over and also given: leave one of them out" for key in axes if keys.count(key) > 1]
    if problems:
        raise UserError(dict.fromkeys(problems))
    return found


def _axis(override: Any) -> Axis:
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    key, value = str(override.get_key_element()).lstrip("+"), override.value()
    log = "log" in value.tags
    if isinstance(value, IntervalSweep):
        low, high = value.start, value.end
        return Axis(key, None, low, high, None, log, isinstance(low, int) and isinstance(high, int))  # type: ignore[arg-type]
    if isinstance(value, RangeSweep) and not log:
        numbers = [n if isinstance(n, int) else float(n) for n in itertools.islice(value.range(), MAX_VALUES)]
        if len(numbers) > 1 and value.step > 0:
            low, step = float(numbers[0]), float(value.step)
            whole = all(isinstance(n, int) for n in numbers)
            return Axis(key, None, low, low + (len(numbers) - 1) * step, step, False, whole)
    return Axis(key, list(itertools.islice(override.sweep_string_iterator(), MAX_VALUES)), log=log)


def _problems(text: str, override: Any, axis: Axis) -> Iterator[str]:
    from hydra.core.override_parser.types import RangeSweep

    if other := sorted(set(override.value().tags) - {"log"}):
        yield f"'{text}': tag {', '.join(other)} means nothing here: the only tag is log"
    if (
        isinstance(override.value(), RangeSweep)
        and next(itertools.islice(override.value().range(), MAX_VALUES - 1, None), None) is not None
    ):
        yield f"'{text}' has {MAX_VALUES:,} values or more: give an interval(a,b), or a longer step"
    if axis.values is not None:
        if axis.log:
            yield f"'{text}': log is for interval(a,b), not for listed values"
        if not axis.values:
            yield f"'{text}' has no values"
        if len(set(axis.values)) < len(axis.values):
            yield f"'{text}' names a value twice"
    elif not axis.low < axis.high or not math.isfinite(axis.high - axis.low):
        yield f"'{text}': an interval goes from the lower number to the higher"
    elif axis.log and axis.low <= 0:
        yield f"'{text}': log is for numbers above 0"
