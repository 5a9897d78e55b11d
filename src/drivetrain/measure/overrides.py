"""Changes of a run: overrides on top of others, and what the settings in which two runs differ claim of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from drivetrain.config.catalog import LISTS, options, still_applies
from drivetrain.core.option import Effect, Option, RunSpec
from drivetrain.core.overrides import key_of
from drivetrain.launch.job import Job
from drivetrain.run.identity import flatten

STRICTNESS: tuple[Effect, ...] = ("exact", "close", "changes")
# Values of no group that training does not depend on.
WITHOUT_EFFECT = {
    "log_every", "evaluate_every", "select", "output_dir", "trust", "recipe", "resume", "resume_changed",
}  # fmt: skip


def groups_of(overrides: Sequence[str]) -> set[str]:
    """The config groups that these overrides touch."""
    return {key_of(override).split(".")[0] for override in overrides}


def apply(overrides: Sequence[str], changes: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """Apply `changes` on top of `overrides`: a change replaces its key, and a new option drops keys that it does not have."""
    return [*unchanged(overrides, changes, config_dirs), *changes]


def unchanged(overrides: Sequence[str], changes: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """The overrides that still apply after `changes`."""
    groups = options(tuple(config_dirs))
    keys = {key_of(change) for change in changes}
    chosen = {key_of(c): c.partition("=")[2] for c in changes if key_of(c) in groups and key_of(c) not in LISTS}
    return [o for o in overrides if key_of(o) not in keys and still_applies(key_of(o), chosen, config_dirs)]


def with_channels_last(run: RunSpec) -> list[str]:
    """The override that adds channels_last to the run's edits of the model; none where it is among them or has no effect."""
    edits = run.names("surgery")
    return [] if "channels_last" in edits or not run.model.may_convolve else [f"surgery=[{','.join([*edits, 'channels_last'])}]"]


def between(first: Job, other: Job) -> tuple[Effect, list[str]]:
    """What the difference of two runs claims: the weakest claim among the settings that differ, and those that make it."""
    found = list(_differences(first, other))
    weakest = max((effect for _, effect in found), key=STRICTNESS.index, default=STRICTNESS[0])
    return weakest, [name for name, effect in found if effect == weakest]


def _differences(first: Job, other: Job) -> Iterator[tuple[str, Effect]]:
    """Each setting that differs, as a user writes it, and its effect."""
    old, new = first.composed.plain, other.composed.plain
    for group in other.composed.choices:  # a group of which several options are chosen has no section where none is
        yield from _in_group(group, first, other, old.get(group) or {}, new.get(group) or {})
    for key in new.keys() - other.composed.choices.keys():
        if old.get(key) != new[key]:
            yield key, "exact" if key in WITHOUT_EFFECT else "changes"


def _in_group(group: str, first: Job, other: Job, old: Any, new: Any) -> Iterator[tuple[str, Effect]]:
    before, after = _options(first, group), _options(other, group)
    if group in LISTS or list(before) == list(after):
        for name in before.keys() & after.keys():
            knobs = (old[name], new[name]) if group in LISTS else (old, new)
            prefix = f"{group}.{name}" if group in LISTS else group
            yield from _in_option(prefix, before[name], after[name], *knobs)
        if list(before) != list(after):  # other options, or the same ones in another order
            apart = {name: option for name, option in (before | after).items() if (name in before) != (name in after)}
            yield other.run.named(group), _weakest((apart or after).values())
    else:
        yield other.run.named(group), _weakest([*before.values(), *after.values()])
        (option,) = after.values()
        for knob in (k for k in option.key_effects if k in old and k in new and old[k] != new[k]):
            yield f"{group}.{knob}", option.key_effects[knob]


def _in_option(
    prefix: str, before: Option, after: Option, old: dict[str, Any], new: dict[str, Any]
) -> Iterator[tuple[str, Effect]]:
    """The knobs of one option that differ."""
    old, new = flatten(old), flatten(new)
    for knob in (k for k in {**old, **new} if old.get(k) != new.get(k)):
        effect = after.key_effects.get(knob.split(".")[0]) or _weakest([before, after])
        yield f"{prefix}.{knob}", effect


def _options(job: Job, group: str) -> dict[str, Option]:
    """Name → option of those that a run chose; a sum of several is one."""
    parts = job.run.parts[group]
    return dict(zip(job.run.names(group), parts, strict=True)) if group in LISTS else {str(job.composed.choice(group)): parts}


def _weakest(options: Any) -> Effect:
    """The weakest claim of several options."""
    return max((option.effect_as_set() for option in options), key=STRICTNESS.index)
