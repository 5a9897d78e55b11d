"""What a config group's options are made of: typed knobs, and rules beside the code they guard.

An option's knobs are its constructor's arguments: the annotation says type and range, the YAML in
conf/ gives the value. Constructors only keep their arguments; nothing is built before every rule has spoken.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]  # 0 … 1
Momentum = Annotated[float, Ge(0), Lt(1)]  # 0 … below 1
Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Length = float | str  # below 1: a share of the run; a whole number: updates; "5ep": epochs (read by plan.Horizon)


@dataclass
class RunSpec:
    """A whole run as its options, before anything is built."""

    choices: dict[str, Any]  # group → option's name (a list for surgery, augment, logger)
    values: dict[str, Any]  # the keys of conf/config.yaml that are no group
    parts: dict[str, Any] = field(default_factory=dict)  # group → Option, or a list of them

    def __getattr__(self, group: str) -> Any:
        try:
            return self.__dict__["parts"][group]
        except KeyError:
            raise AttributeError(group) from None

    def named(self, group: str) -> str:
        """The setting as the user would type it, for messages."""
        choice = self.choices.get(group)
        return f"{group}=[{','.join(choice)}]" if isinstance(choice, list) else f"{group}={choice}"

    def names(self, group: str) -> list[str]:
        """The names of the options of a group that takes several, in their order, for messages."""
        return [name for name in self.choices[group] if name != "none"]


class Option:
    """One option of one config group. A group's base class is its off switch.

    An option is data: its knobs as the config gave them. What happens in a run is the business of the object that `build`
    returns.
    """

    machine_local_keys: tuple[str, ...] = ()  # knobs of this machine (paths, devices): never a recipe's, not in the hash

    def validate(self, run: RunSpec) -> Iterator[str]:
        """Problems that can be found without torch, the model or the data, one line each."""
        return iter(())

    def advise(self, run: RunSpec) -> Iterator[str]:
        """Settings that work and probably do not do what was wanted: logged at the start, never refused."""
        return iter(())

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        """Problems that need torch or the device to be found, one line each."""
        return iter(())

    def build(self, context: BuildContext) -> Any:
        """The technique at work in one run: a copy of this option that `setup` has bound to the run.

        The option itself stays as it is, and can be built again.
        """
        built = copy.deepcopy(self)
        built.setup(context)
        return built

    def setup(self, context: BuildContext) -> None:
        """Prepare this copy for its run. A technique overrides it to make what it needs."""


def needs_extra(package: str, extra: str, setting: str) -> Iterator[str]:
    """The problem of an optional package that is not installed, if it is not."""
    from importlib.util import find_spec

    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # not even the package around it
        found = None
    if found is None:
        yield f"{setting} needs the package '{package}', which is not installed: pip install 'drivetrain[{extra}]'"
