"""The changes that lead from GOOD to BAD: each can be made alone, where the rules of the options allow it.

An option and its keys are one change. Changes of which neither can be made without the other are joined to one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.config.catalog import LISTS
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import format_value
from drivetrain.launch.job import Job
from drivetrain.run.identity import flatten

SAME_DATA = ("task", "data")  # groups whose options the two must share
NEVER_TRIED = ("output_dir", "resume", "resume_changed", "recipe", "trust", "select", "logger")
# How long a run is, and its random numbers: a step is as fast with others.
NOT_OF_SPEED = ("epochs", "updates", "evaluate_every", "stop", "runtime.seed")
NOT_OF_QUALITY = ("runtime.seed", "saving")  # seeds are paired, and a saved run learns nothing from that


@dataclass(frozen=True)
class Change:
    """One change: its name, the two values as text, and the overrides that make it."""

    key: str
    good: str
    bad: str
    overrides: tuple[str, ...] = ()  # none of an item of a list: the whole list is given
    item: tuple[str, str] | None = None  # the list's group, and the option that one of the two lists
    parts: tuple[Change, ...] = ()  # of joined changes


@dataclass
class Changes:
    """All changes between two jobs, and the overrides of any subset of them."""

    good: Job
    bad: Job
    quality: bool
    not_tried: list[str] = field(default_factory=list)  # keys in which the two differ as well

    def __post_init__(self) -> None:
        self._old, self._new = self.good.composed.plain, self.bad.composed.plain
        self._local = self.good.machine_local_keys | self.bad.machine_local_keys

    def found(self) -> list[Change]:
        """The changes, in the order of conf/config.yaml. Raises UserError where the two are about different data."""
        if problems := list(self._different_data()):
            raise UserError(problems)
        return list(self._tried(change for key in self._new for change in self._of(key)))

    def overrides(self, chosen: Sequence[Change]) -> list[str]:
        """The overrides that make these changes on top of GOOD."""
        single = [part for change in chosen for part in (change.parts or (change,))]
        given = [override for change in single for override in change.overrides]
        for group in dict.fromkeys(change.item[0] for change in single if change.item is not None):
            toggled = {change.item[1] for change in single if change.item is not None and change.item[0] == group}
            given = [*self._list(group, toggled), *given]
        return given

    def left_over(self, job: Job) -> list[str]:
        """The keys in which a job that should be BAD differs from it."""
        have, want = (dict(self._compared(plain)) for plain in (job.composed.plain, self._new))
        return sorted(key for key in {**have, **want} if have.get(key) != want.get(key))

    def _different_data(self) -> Iterator[str]:
        old, new = self.good.composed.choices, self.bad.composed.choices
        both = dict.fromkeys(key for plain in (self._old, self._new) for key in flatten(plain["data"]))
        keys = [f"data.{key}" for key in both if f"data.{key}" in self._local]
        given = {group: (old[group], new[group]) for group in SAME_DATA}
        given |= {key: tuple(flatten(plain).get(key) for plain in (self._old, self._new)) for key in keys}  # type: ignore[misc]
        for key, (a, b) in given.items():
            if a != b:
                hint = f"give both the same, as {key}={format_value(b)} after them"
                yield f"the two are about different data: {key}={a} and {key}={b}: {hint}"

    def _tried(self, changes: Iterator[Change]) -> Iterator[Change]:
        """The changes without those that cannot matter, whose keys are noted."""
        skipped = {*NEVER_TRIED, *(NOT_OF_QUALITY if self.quality else NOT_OF_SPEED)}
        for change in changes:
            if skipped.intersection((change.key, change.key.split(".")[0])):
                self.not_tried += [change.key] if change.key not in ("output_dir", "recipe", "resume", "resume_changed") else []
            else:
                yield change

    def _compared(self, plain: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        skipped = {*NEVER_TRIED, *(NOT_OF_QUALITY if self.quality else NOT_OF_SPEED), "saving"}
        for key, value in flatten(plain).items():
            if not skipped.intersection((key, key.split(".")[0])):
                yield key, value

    def _of(self, key: str) -> Iterator[Change]:
        """The changes of a group, or of a value that belongs to none."""
        old, new = self.good.composed.choices.get(key), self.bad.composed.choices.get(key)
        if key in LISTS and isinstance(old, list) and isinstance(new, list):
            if [name for name in old if name in new] == [name for name in new if name in old]:
                yield from self._items(key, old, new)
            else:
                yield Change(key, str(format_value(old)), str(format_value(new)), tuple(_section(key, new, self._new)))
        elif old != new:
            yield Change(key, format_value(old), format_value(new), tuple(_section(key, new, self._new)))
        else:
            yield from _values(key, self._old.get(key), self._new.get(key))

    def _items(self, group: str, old: list[str], new: list[str]) -> Iterator[Change]:
        for name in _merged(old, new):
            if name in old and name in new:
                yield from _values(f"{group}.{name}", self._old[group][name], self._new[group][name])
            else:
                was, now = (name if name in names else "–" for names in (old, new))
                yield Change(f"{group}=[{name}]", was, now, item=(group, name))

    def _list(self, group: str, toggled: set[str]) -> Iterator[str]:
        """The overrides of GOOD's list with these items added or removed, with every key of every item."""
        old, new = self.good.composed.choice(group), self.bad.composed.choice(group)
        names = [name for name in _merged(old, new) if (name in old) != (name in toggled)]
        yield f"{group}={format_value(names)}"
        for name in names:
            yield from _keys(f"{group}.{name}", (self._old if name in old else self._new)[group][name])


def joined(parts: Sequence[Change]) -> Change:
    """Changes that are made together or not at all."""
    if len(parts) == 1:
        return parts[0]
    key, good, bad = (" and ".join(texts) for texts in zip(*((p.key, p.good, p.bad) for p in parts), strict=True))
    return Change(key, good, bad, parts=tuple(parts))


def in_order(changes: Sequence[Change], can_run: Callable[[Sequence[Change]], bool]) -> list[Change]:
    """The changes in an order in which the first few of them can always run; those that need each other are joined."""
    done: list[Change] = []
    waiting = list(changes)
    while waiting:
        steps = itertools.chain(itertools.combinations(waiting, 1), itertools.combinations(waiting, 2))
        step = next((step for step in steps if can_run([*done, *step])), tuple(waiting))
        done.append(joined(step))
        waiting = [change for change in waiting if change not in step]
    return done


def _values(key: str, old: Any, new: Any) -> Iterator[Change]:
    """The changed values at and below a key. Mappings are compared value by value where they have the same keys."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for name in new:
            yield from _values(f"{key}.{name}", old[name], new[name])
    elif old != new and not key.endswith("._target_"):
        yield Change(key, format_value(old), format_value(new), (f"{key}={format_value(new)}",))


def _section(group: str, option: Any, plain: dict[str, Any]) -> Iterator[str]:
    """The overrides that choose a group's option with all its keys."""
    yield f"{group}={format_value(option)}"
    yield from _keys(group, plain[group])


def _keys(prefix: str, section: dict[str, Any]) -> Iterator[str]:
    for key, value in flatten(section).items():
        if key and value != {} and key.split(".")[-1] != "_target_":
            yield f"{prefix}.{key}={format_value(value)}"


def _merged(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """All names of two lists whose common names have the same order, in an order that both keep."""
    merged: list[str] = []
    old_left, new_left = list(old), list(new)
    for common in [*(name for name in old if name in new), None]:
        for left in (old_left, new_left):
            while left and left[0] != common:
                merged.append(left.pop(0))
        if common is not None:
            merged.append(common)
            del old_left[0], new_left[0]
    return merged
