"""All options of a run, before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drivetrain.core.options import groups
from drivetrain.core.options.allowed import Length
from drivetrain.core.options.overrides import format_value
from drivetrain.core.step.target_kinds import TargetKind


class InvalidValue(KeyError):
    """A rule reads an option or a value that is invalid in the config. Not an AttributeError, because properties raise it."""


class CheckedValues(dict[str, Any]):
    """The options or the values of a run. `wrong` has the names of those left out as invalid: reading one raises InvalidValue."""

    def __init__(self, *given: Mapping[str, object]) -> None:
        super().__init__(*given)
        self.wrong: set[str] = set()

    def __missing__(self, name: str) -> object:
        raise InvalidValue(name) if name in self.wrong else KeyError(name)


class Parts:
    """The option of each group, with the type known to the other groups."""

    adapter: groups.Adapter
    augment: Sequence[groups.Augment]
    batch: groups.Batch
    checkpointing: groups.Checkpointing
    clip: groups.Clip
    compile: groups.Compile
    data: groups.Data
    debug: groups.Debug
    ema: groups.Ema
    loader: groups.Loader
    logger: Sequence[groups.Logger]
    loss: groups.Loss
    metrics: Sequence[groups.Metric]
    model: groups.Model
    optimizer: groups.Optimizer
    parallel: groups.Parallel
    precision: groups.Precision
    runtime: groups.Runtime
    saving: groups.Saving
    scheduler: groups.Scheduler
    stop: groups.Stop
    surgery: Sequence[groups.Surgery]
    task: groups.Task


@dataclass
class RunSpec(Parts):
    """All options of a run. Each is an attribute with the name of its group."""

    choices: dict[str, Any]  # group → option's name (a list for surgery, augment, logger)
    values: dict[str, Any]  # the keys of conf/config.yaml that are not groups
    parts: dict[str, Any] = field(default_factory=dict)  # group → Option, or a list of them
    from_environment: Callable[[str], bool] = lambda _: False  # whether the value of a dotted key came from the environment
    not_for_recipes: set[str] = field(default_factory=set)  # dotted keys of the operator's values, which no recipe may contain
    stages: list[Stage] = field(default_factory=list)  # of the whole run, in order; [] if no setting changes during the run

    def __getattr__(self, group: str) -> object:
        try:
            return self.__dict__["parts"][group]
        except InvalidValue:
            raise
        except KeyError:
            raise AttributeError(group) from None

    def with_parts(self, **parts: object) -> RunSpec:
        """Return the run with other options: group → option."""
        return replace(self, parts=type(self.parts)({**self.parts, **parts}))

    def named(self, group: str) -> str:
        """Return the setting as the user would type it, for messages."""
        choice = self.choices.get(group)
        return f"{group}=[{','.join(choice)}]" if isinstance(choice, list) else f"{group}={choice}"

    def tried(self) -> dict[str, Any]:
        """Return the options chosen by trial runs, by group."""
        one = {group: part for group, part in self.parts.items() if not isinstance(part, list)}
        return {group: option for group, option in one.items() if option is not None and option.untried}

    def names(self, group: str) -> list[str]:
        """Return the names of the options of a group that takes several, in order, for messages."""
        return [name for name in self.choices[group] if name != "none"]

    @property
    def target_kind(self) -> TargetKind | None:
        """The kind of the run's targets: from its data, or else from its loss, if that takes a single kind."""
        given, takes = self.data.targets, self.loss.takes
        return takes[0] if given is None and len(takes) == 1 else given


@dataclass(frozen=True)
class Stage:
    """A part of a run: the run's config with changes, up to a boundary."""

    until: Length | None  # None: the end of the run
    changes: Mapping[str, object]  # dotted key or group → value
    run: RunSpec  # its options

    @property
    def end(self) -> str:
        """The end of the stage, in words."""
        return "to the end" if self.until is None else f"until {self.until}"

    @property
    def settings(self) -> str:
        """The changed settings, as a user would type them."""
        return " ".join(f"{key}={_shown(value)}" for key, value in self.changes.items()) or "the config of the run"

    @property
    def title(self) -> str:
        """Its end and its settings in one line."""
        return f"{self.end}: {self.settings}"

    def typed(self) -> str:
        """The stage in the form of an override."""
        return format_value({**({} if self.until is None else {"until": self.until}), **self.changes})


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(_shown, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
