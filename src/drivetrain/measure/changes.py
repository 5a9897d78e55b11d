"""Changes of a run: overrides on top of others, the claim of two runs' difference, and its single changes.

Each change from one config to another can be made alone, if the options' rules allow it. An option and its keys are one change.
Changes that need each other are joined.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from drivetrain.config.catalog import LISTS, options, still_applies
from drivetrain.config.composed import flatten
from drivetrain.core.options.option import Effect, Option, RunSpec
from drivetrain.core.options.overrides import format_value, key_of
from drivetrain.launch.job import Job

STRICTNESS: tuple[Effect, ...] = ("exact", "close", "changes")
# Values outside all groups that do not affect training.
WITHOUT_EFFECT = {
    "log_every", "evaluate_every", "evaluate_batch", "select", "output_dir", "trust", "recipe", "resume", "resume_changed",
}  # fmt: skip


def groups_of(overrides: Sequence[str]) -> set[str]:
    """The config groups that these overrides touch."""
    return {key_of(override).split(".")[0] for override in overrides}


def apply(overrides: Sequence[str], changes: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """Apply `changes` on top of `overrides`: a change replaces its key, and a new option drops the keys that it lacks."""
    return [*unchanged(overrides, changes, config_dirs), *changes]


def unchanged(overrides: Sequence[str], changes: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """The overrides that still apply after `changes`."""
    groups = options(tuple(config_dirs))
    keys = {key_of(change) for change in changes}
    chosen = {key_of(c): c.partition("=")[2] for c in changes if key_of(c) in groups and key_of(c) not in LISTS}
    return [o for o in overrides if key_of(o) not in keys and still_applies(key_of(o), chosen, config_dirs)]


def with_channels_last(run: RunSpec) -> list[str]:
    """The override that adds channels_last to the run's edits of the model; none if it is among them or has no effect."""
    edits = run.names("surgery")
    return [] if "channels_last" in edits or not run.model.may_convolve else [f"surgery=[{','.join([*edits, 'channels_last'])}]"]


def between(first: Job, other: Job) -> tuple[Effect, list[str]]:
    """The claim of the difference of two runs: the weakest among the differing settings, and the settings that make it."""
    found = [claim for change in Changes(first, other).found() for claim in _claims(change, first, other)]
    weakest = max((effect for _, effect in found), key=STRICTNESS.index, default=STRICTNESS[0])
    return weakest, list(dict.fromkeys(name for name, effect in found if effect == weakest))


def _claims(change: Change, first: Job, other: Job) -> Iterator[tuple[str, Effect]]:
    """The settings of a change as typed by a user, and the effect of each."""
    group, *names = re.split("[.=]", change.item[0] if change.item else change.key)
    if group not in other.composed.choices:
        yield group if change.item else change.key, "exact" if change.key in WITHOUT_EFFECT else "changes"
        return
    before, after = _options(first, group), _options(other, group)
    if names:  # a setting of an option of both runs
        name, *settings = names if group in LISTS else [*after, *names]
        effect = after[name].key_effects.get(settings[0]) if settings else None
        yield change.key, effect or _weakest([before[name], after[name]])
        return
    apart = {name: option for name, option in (before | after).items() if (name in before) != (name in after)}
    yield other.run.named(group), _weakest((apart or after).values())  # `after`: the same ones in another order
    if group not in LISTS:
        (option,) = after.values()
        old, new = (job.composed.plain[group] for job in (first, other))
        for setting in (key for key in option.key_effects if key in old and key in new and old[key] != new[key]):
            yield f"{group}.{setting}", option.key_effects[setting]


def _options(job: Job, group: str) -> dict[str, Option]:
    """Name → option, for a run's chosen options; a sum of several is one."""
    parts = job.run.parts[group]
    return dict(zip(job.run.names(group), parts, strict=True)) if group in LISTS else {str(job.composed.choice(group)): parts}


def _weakest(options: Iterable[Option]) -> Effect:
    """The weakest claim of several options."""
    return max((option.effect_as_set() for option in options), key=STRICTNESS.index)


STAGES = "stages"


@dataclass(frozen=True)
class Change:
    """One change: its name, the two values as text, and the overrides that make it."""

    key: str
    good: str
    bad: str
    overrides: tuple[str, ...] = ()  # none for an item of a list: the whole list is set
    item: tuple[str, str] | None = None  # the list's group, and the option in one of the two lists; or a stage as typed
    parts: tuple[Change, ...] = ()  # of joined changes

    @property
    def label(self) -> str:
        """The change as typed by a user."""
        if self.item is not None and self.bad == "–":
            return f"{self.item[0]} without {self.good}"
        return self.overrides[0] if self.overrides else self.key


@dataclass
class Changes:
    """All changes between two jobs, and the overrides of any subset of them."""

    good: Job
    bad: Job
    skipped: Set[str] = frozenset()  # keys and groups to leave unchanged
    not_made: list[str] = field(default_factory=list)  # of these, the keys that differ between the two

    def __post_init__(self) -> None:
        self._old, self._new = self.good.composed.plain, self.bad.composed.plain

    def found(self) -> list[Change]:
        """The changes, in the order of conf/config.yaml, those of no group last."""
        every = [change for key in {**self.bad.composed.choices, **self._new} for change in self._of(key)]
        made = [change for change in every if not {change.key, re.split("[.=]", change.key)[0]} & self.skipped]
        self.not_made = [change.key for change in every if change not in made]
        return made

    def overrides(self, chosen: Sequence[Change]) -> list[str]:
        """The overrides that make these changes on top of GOOD."""
        single = [part for change in chosen for part in (change.parts or (change,))]
        toggled: dict[str, set[str]] = {}
        for group, name in (change.item for change in single if change.item is not None):
            toggled.setdefault(group, set()).add(name)
        lists = [word for group, names in toggled.items() for word in self._list(group, names)]
        return [*lists, *(override for change in single for override in change.overrides)]

    def _of(self, key: str) -> Iterator[Change]:
        """The changes of a group, or of a value outside all groups."""
        old, new = self.good.composed.choices.get(key), self.bad.composed.choices.get(key)
        before, after = self.good.run.stages, self.bad.run.stages
        if key == STAGES and bool(before) != bool(after) and any(stage.changes for stage in (*before, *after)):
            for stage in (*before, *after):
                if stage.changes:
                    settings = ("–", stage.settings) if after else (stage.settings, "–")
                    yield Change(f"stage {stage.title}", *settings, item=(STAGES, stage.typed()))
        elif (
            key in LISTS and isinstance(old, list) and isinstance(new, list)
            and [name for name in old if name in new] == [name for name in new if name in old]
        ):  # fmt: skip
            yield from self._items(key, old, new)
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
        if group == STAGES:
            have, every = ([stage.typed() for stage in job.run.stages] for job in (self.good, self.bad))
            kept = [name if (name in have) != (name in toggled) else _without_changes(name) for name in have or every]
            yield f"stages=[{','.join(kept)}]" if kept != [*map(_without_changes, kept)] else "stages=null"
            return
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
    """The changes in an order in which every prefix can run; changes that need each other are joined."""
    done: list[Change] = []
    waiting = list(changes)
    while waiting:
        steps = itertools.chain(itertools.combinations(waiting, 1), itertools.combinations(waiting, 2))
        step = next((step for step in steps if can_run([*done, *step])), tuple(waiting))
        done.append(joined(step))
        waiting = [change for change in waiting if change not in step]
    return done


def _values(key: str, old: object, new: object) -> Iterator[Change]:
    """The changed values at and below a key. Mappings with the same keys are compared value by value."""
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
    """All names of two lists in an order that fits both; their common names must have the same order."""
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [name for kind, i, j, k, n in blocks for name in (*old[i:j], *(new[k:n] if kind != "equal" else ()))]


def _without_changes(stage: str) -> str:
    """A stage, as typed, without its changes: it has the same length and the run's config."""
    until = re.match(r"\{(until:[^,}]+)", stage)
    return f"{{{until[1]}}}" if until else "{}"
