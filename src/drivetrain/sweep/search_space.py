"""The space of a search, from Hydra's sweep grammar: what each word may become."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.overrides import key_of, parse_each


@dataclass
class Axis:
    """A key and what it may be: one of `values`, or a number from `low` to `high`, both included."""

    key: str
    values: list[str] | None = None  # as in a word
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    log: bool = False
    whole: bool = False

    def distribution(self) -> Any:
        """For optuna."""
        from optuna import distributions as d

        if self.values is not None:
            return d.CategoricalDistribution(self.values)
        if self.whole:
            return d.IntDistribution(int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        return d.FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def listed(self) -> list[Any] | None:
        """All the values, as optuna has them; None where there are infinitely many."""
        if self.values is not None:
            return list(self.values)
        if self.step is None and not self.whole:
            return None
        step = self.step or 1
        numbers = [self.low + n * step for n in range(math.floor((self.high - self.low) / step + 1e-9) + 1)]
        return [int(n) for n in numbers] if self.whole else numbers

    def examples(self) -> list[Any]:
        """Values to try a config with: each that is named, or one in the middle."""
        if self.values is not None:
            return list(self.values)
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return [round(middle)] if self.whole else [middle]

    def word(self, value: Any) -> str:
        """This value as a word; of a number no more digits than mean anything."""
        return f"{self.key}={float(f'{value:.6g}') if isinstance(value, float) else value}"


def read(words: Sequence[str]) -> list[str | Axis]:
    """Each word as it is, or as an axis. Raises UserError with all that is wrong."""
    found: list[str | Axis] = []
    problems: list[str] = []
    for word, override in parse_each(words, "key=value, key=a,b or key=interval(a,b)", problems):
        if not override.is_sweep_override():
            found.append(word)
            continue
        axis = _axis(override)
        if wrong := list(_wrong(word, override, axis)):
            problems += wrong
        else:
            found.append(axis)
    axes = [a.key for a in found if isinstance(a, Axis)]
    if not axes and not problems:
        problems.append(
            "hydra/sweeper=optuna has nothing to search: give a key several values, as optimizer.lr=interval(1e-4,1e-1)"
        )
    problems += [f"{key} is searched over and given besides: leave one of them out" for key in axes if _times(key, words) > 1]
    if problems:
        raise UserError(dict.fromkeys(problems))
    return found


def _times(key: str, words: Sequence[str]) -> int:
    return sum(key_of(word) == key for word in words)


def _axis(override: Any) -> Axis:
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    key, value = str(override.get_key_element()).lstrip("+"), override.value()
    log = "log" in value.tags
    if isinstance(value, IntervalSweep):
        return Axis(key, None, value.start, value.end, None, log, isinstance(value.start, int) and isinstance(value.end, int))  # type: ignore[arg-type]
    if isinstance(value, RangeSweep) and not log:
        numbers = [float(n) if isinstance(n, float) else n for n in _numbers(value)]
        whole = all(isinstance(n, int) for n in numbers)
        if len(numbers) > 1 and value.step > 0:
            low, step = float(numbers[0]), float(value.step)
            return Axis(key, None, low, low + (len(numbers) - 1) * step, step, False, whole)
    return Axis(key, list(override.sweep_string_iterator()), log=log)


def _numbers(value: Any) -> list[Any]:
    return [n if isinstance(n, int) else float(n) for n in value.range()]


def _wrong(word: str, override: Any, axis: Axis) -> Iterator[str]:
    if other := sorted(set(override.value().tags) - {"log"}):
        yield f"'{word}': tag {', '.join(other)} means nothing here: there is log"
    if axis.values is not None:
        if axis.log:
            yield f"'{word}': log is for interval(a,b), which has no listed values"
        if not axis.values:
            yield f"'{word}' has no values"
        if len(set(axis.values)) < len(axis.values):
            yield f"'{word}' names a value twice"
    elif not axis.low < axis.high or not math.isfinite(axis.high - axis.low):
        yield f"'{word}': an interval goes from the lower number to the higher"
    elif axis.log and axis.low <= 0:
        yield f"'{word}': log is for numbers above 0"
