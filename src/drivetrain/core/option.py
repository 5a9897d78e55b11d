"""Base classes of the config groups' options: typed settings, and validation next to the code that it protects.

An option's settings are its constructor's arguments: the annotation gives type and range, the YAML in
conf/ gives the value. Constructors only store their arguments; nothing is built before all validation has passed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Lt

from drivetrain.core.allowed import EPOCHS

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext
    from drivetrain.core.protocols import Trials
    from drivetrain.core.stages import Stage

LARGEST_FLOAT = 1e38  # of a setting: float32, which it meets in the step, ends at 3e38
LARGEST_COUNT = 10**12
Positive = Annotated[float, Gt(0), Le(LARGEST_FLOAT)]
NonNegative = Annotated[float, Ge(0), Le(LARGEST_FLOAT)]
Share = Annotated[float, Ge(0), Le(1)]  # 0 … 1
Momentum = Annotated[float, Ge(0), Lt(1)]  # 0 … below 1
Count = Annotated[int, Ge(1), Le(LARGEST_COUNT)]
CountOrZero = Annotated[int, Ge(0), Le(LARGEST_COUNT)]
Few = Annotated[int, Ge(1), Le(100)]  # iterations within one update, and what else multiplies its time
Bins = Annotated[int, Ge(2), Le(10_000)]  # of a metric: each has its counts
# On training: the same numbers; the same mathematics, rounded otherwise or summed in another order; or another run.
Effect = Literal["exact", "close", "changes"]
# Below 1: a share of the run; a whole number: updates; "5ep": epochs (read by horizon.Horizon).
Length = float | Annotated[str, EPOCHS]


class InvalidValue(KeyError, AttributeError):
    """A rule has asked for an option or a value that the config did not give rightly."""


class CheckedValues(dict[str, Any]):
    """The options or the values of a run. `wrong` names those that are left out: to ask for one raises InvalidValue."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.wrong: set[str] = set()

    def __missing__(self, name: str) -> Any:
        raise InvalidValue(name) if name in self.wrong else KeyError(name)


@dataclass
class RunSpec:
    """Holds all options of a run, before anything is built."""

    choices: dict[str, Any]  # group → option's name (a list for surgery, augment, logger)
    values: dict[str, Any]  # the keys of conf/config.yaml that are no group
    parts: dict[str, Any] = field(default_factory=dict)  # group → Option, or a list of them
    from_environment: Callable[[str], bool] = lambda _: False  # whether the value of a dotted key came from the environment
    not_for_recipes: set[str] = field(default_factory=set)  # dotted keys whose values no recipe may have: the operator gave them
    stages: list[Stage] = field(default_factory=list)  # of the whole run, in their order; [] where nothing changes on the way

    def __getattr__(self, group: str) -> Any:
        try:
            return self.__dict__["parts"][group]
        except InvalidValue:
            raise
        except KeyError:
            raise AttributeError(group) from None

    def with_parts(self, **parts: Any) -> RunSpec:
        """Return the run with other options: group → option."""
        return replace(self, parts=type(self.parts)({**self.parts, **parts}))

    def named(self, group: str) -> str:
        """Return the setting as the user would type it, for messages."""
        choice = self.choices.get(group)
        return f"{group}=[{','.join(choice)}]" if isinstance(choice, list) else f"{group}={choice}"

    def tried(self) -> dict[str, Option]:
        """Return the options of which trials choose before the ranks start, by their groups."""
        return {group: part for group, part in self.parts.items() if isinstance(part, Option) and part.untried}

    def names(self, group: str) -> list[str]:
        """Return the names of the options of a group that takes several, in order, for messages."""
        return [name for name in self.choices[group] if name != "none"]


class Option:
    """One option of one config group. A group's base class is its off switch.

    An option is data: its settings as the config gave them, which nobody sets a second time. The object that `build` returns
    does the work in a run.
    """

    # The claim of an option beside its group's off switch, or beside others of its group that claim the same. `drivetrain
    # compare` and `certify` test it. A class inherits `changes` alone; of a base class that is exact or close it states its own,
    # or the contract test asks for it: what it does not say, it does not claim.
    effect: ClassVar[Effect] = "changes"
    changes: ClassVar[str] = ""  # what it changes in training, in one line, where it is not exact
    key_effects: ClassVar[Mapping[str, Effect]] = {}  # of settings whose values have another effect than the option

    # The changes of a group by a stage of a run: whether it may choose another option, and patterns of the settings that it may
    # set. `why_fixed` is why the rest is one for the whole run. A group's base class says it.
    stage_option: ClassVar[bool] = False
    stage_keys: ClassVar[tuple[str, ...]] = ()
    why_fixed: ClassVar[str] = "it is for the whole run"

    # Of an option that finds something by trials before the ranks start (`choose`): what to set where there can be none. And
    # whether a run cannot do without, so that it is refused where another launcher has started its ranks.
    untried: str = ""
    needs_trial: ClassVar[bool] = False

    step_waits = ""  # why a step waits for the device, where it has to; "" means that it never does
    needs_real_tensors = ""  # why it cannot run on torch's fake tensors, by which the tests stand in for a device
    machine_local_keys: ClassVar[tuple[str, ...]] = ()  # of this machine (paths, devices): not in recipes, nor the config hash
    identifying_keys: ClassVar[tuple[str, ...]] = ()  # those of them that make another run: in the config hash after all

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "effect" not in cls.__dict__ and cls.effect != "changes":
            cls.effect, cls.changes = "changes", cls.__dict__.get("changes", "")

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if name in own and "_in_run" not in own and name in inspect.signature(type(self)).parameters:
            raise AttributeError(f"{name} is a setting of {type(self).__name__}, and set already: take with_values({name}=…)")
        super().__setattr__(name, value)

    def with_values(self, **values: Any) -> Self:
        """Return a copy with other values of settings, or of what follows from them."""
        made = copy.copy(self)
        vars(made).update(values)
        return made

    def copied(self) -> Self:
        """Return a deep copy for one run, whose own methods may set what they like."""
        return copy.deepcopy(self).with_values(_in_run=True)

    def resolve(self, run: RunSpec) -> Self:
        """Return this option with what depends on the others, which are resolved in the order of their groups.

        It is called once, before anything is validated.
        """
        return self

    def effect_as_set(self) -> Effect:
        """Return the effect with these settings, for an option whose settings change its claim. It is called after `resolve`."""
        return self.effect

    def roundoff(self) -> float:
        """Return the largest relative error of one rounding in what it computes: that of float32, unless it rounds more."""
        return 2.0**-24

    def validate(self, run: RunSpec) -> Iterator[str]:
        """Yield the problems that can be found without torch, the model or the data, one line each."""
        return iter(())

    def rules(self, run: RunSpec) -> Iterator[str]:
        """Yield what `validate` does, and what a group asks of all its options."""
        return self.validate(run)

    def advise(self, run: RunSpec) -> Iterator[str]:
        """Yield warnings about settings that work but are probably not intended. They are logged at the start."""
        return iter(())

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        """Yield the problems that need torch or the device to be found, one line each."""
        return iter(())

    def choose(self, trials: Trials, recorded: Any = None) -> Option:
        """Return this option with what trials find, before any rank starts. `recorded` is what a resumed run has found."""
        return self

    def build(self, context: BuildContext) -> Any:
        """Return the runtime object: a copy of this option that `setup` has bound to one run.

        The option itself does not change, and can be built again.
        """
        built = self.copied()
        built.setup(context)
        return built

    def setup(self, context: BuildContext) -> None:
        """Prepare this copy for its run. A technique overrides it to create what it needs."""


def needs_extra(package: str, extra: str, setting: str) -> Iterator[str]:
    """Yield a problem if an optional package is not installed."""
    from importlib.util import find_spec

    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # the parent package is missing too
        found = None
    if found is None:
        yield f"{setting} needs the package '{package}', which is not installed: pip install 'drivetrain[{extra}]'"
