"""Base classes of the config groups' options: typed settings, and validation next to the code that it protects.

An option's settings are its constructor's arguments: the annotation gives type and range, the YAML in
conf/ gives the value. Constructors only store their arguments; nothing is built before all validation has passed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from drivetrain.core.errors import UserError
from drivetrain.core.options.allowed import Length
from drivetrain.core.options.context import BuildContext
from drivetrain.core.options.protocols import Trials
from drivetrain.core.options.run_spec import RunSpec
from drivetrain.core.typed import JsonMapping

__all__ = [
    "Bins", "BuildContext", "Count", "CountOrZero", "Effect", "Few", "Length", "Momentum", "NonNegative", "Option", "Positive",
    "RunSpec", "Share", "Trials", "needs_extra",
]  # fmt: skip

T = TypeVar("T")
LARGEST_FLOAT = 1e38  # of a setting: the step computes with it in float32, which ends at 3e38
LARGEST_COUNT = 10**12
Positive = Annotated[float, Gt(0), Le(LARGEST_FLOAT)]
NonNegative = Annotated[float, Ge(0), Le(LARGEST_FLOAT)]
Share = Annotated[float, Ge(0), Le(1)]  # 0 … 1
Momentum = Annotated[float, Ge(0), Lt(1)]  # 0 … below 1
Count = Annotated[int, Ge(1), Le(LARGEST_COUNT)]
CountOrZero = Annotated[int, Ge(0), Le(LARGEST_COUNT)]
Few = Annotated[int, Ge(1), Le(100)]  # iterations within one update, and other factors of its time
Bins = Annotated[int, Ge(2), Le(10_000)]  # of a metric: each has its counts
# On training: the same numbers; the same mathematics with other rounding or order of sums; or another run.
Effect = Literal["exact", "close", "changes"]


class Option:
    """One option of one config group. A group's base class is its off switch.

    An option is data: its settings from the config, never set a second time. The object that `build` returns
    does the work in a run.
    """

    # The claim of an option against its group's off switch, or against others of its group that claim the same. `drivetrain
    # compare` and `certify` test it. A class inherits only `changes`. With an exact or close base class it declares its own
    # effect, or the contract test fails: without a declaration there is no claim.
    effect: ClassVar[Effect] = "changes"
    changes: ClassVar[str] = ""  # its change of training, in one line, where it is not exact
    key_effects: ClassVar[Mapping[str, Effect]] = {}  # of settings whose values have another effect than the option

    # The changes of a group by a stage of a run: whether it may choose another option, and patterns of the settings that it may
    # set. `why_fixed` is the reason why the rest is the same for the whole run. A group's base class sets it.
    stage_option: ClassVar[bool] = False
    stage_keys: ClassVar[tuple[str, ...]] = ()
    why_fixed: ClassVar[str] = "it is for the whole run"

    # Of an option that finds settings by trials before the ranks start (`choose`): the setting to use without trials, and whether
    # the trials are required. Then a run is refused if another launcher has started its ranks.
    untried: str = ""
    needs_trial: ClassVar[bool] = False

    step_waits = ""  # the reason why a step must wait for the device; "": it never does
    needs_real_tensors = ""  # the reason why it cannot run on torch's fake tensors, the tests' substitute for a device
    machine_local_keys: ClassVar[tuple[str, ...]] = ()  # of this machine (paths, devices): not in recipes, nor the config hash
    identifying_keys: ClassVar[tuple[str, ...]] = ()  # machine-local keys that change the run: in the config hash after all

    def __init_subclass__(cls, **named: object) -> None:
        super().__init_subclass__(**named)
        if "effect" not in cls.__dict__ and cls.effect != "changes":
            cls.effect, cls.changes = "changes", cls.__dict__.get("changes", "")

    def __setattr__(self, name: str, value: object) -> None:
        own = vars(self)
        if name in own and "_in_run" not in own and name in inspect.signature(type(self)).parameters:
            raise AttributeError(f"{name} is a setting of {type(self).__name__}, and set already: take with_values({name}=…)")
        super().__setattr__(name, value)

    @classmethod
    def all_of(cls, run: RunSpec) -> list[Self]:
        """Return the run's options of this class, in their order, for code that may import their group."""
        return [
            option
            for part in run.parts.values()
            for option in (part if isinstance(part, list) else [part])
            if isinstance(option, cls)
        ]

    @classmethod
    def of(cls, run: RunSpec) -> Self:
        """Return the run's option of this class, of a group that takes one."""
        return cls.all_of(run)[0]

    def unwritten(self, method: str) -> UserError:
        """Return the error of a class without a method that its base leaves to it."""
        cls = type(self)
        return UserError(
            f"{cls.__module__}.{cls.__name__} has no method {method}, which this run needs: write it as docs/extending.md shows"
        )

    def returned(self, method: str, found: T) -> T:
        """Return a method's result. Raises UserError if it has the wrong type."""
        kind, what = RETURNS[method]
        if isinstance(found, str) or not isinstance(found, kind):
            cls, shown = type(self), repr(found)[:80]
            where = f"{cls.__module__}.{cls.__name__}.{method} ({inspect.getfile(cls)})"
            raise UserError(f"{where} returns {shown}, and is to {what}: write it as docs/extending.md shows")
        return found

    def with_values(self, **values: object) -> Self:
        """Return a copy with other values of settings, or of attributes that follow from them."""
        made = copy.copy(self)
        vars(made).update(values)
        return made

    def copied(self) -> Self:
        """Return a deep copy for one run; its methods may set any attribute."""
        return copy.deepcopy(self).with_values(_in_run=True)

    def resolve(self, run: RunSpec) -> Self:
        """Return this option adapted to the others, which are resolved in the order of their groups.

        It is called once, before anything is validated.
        """
        return self

    def effect_as_set(self) -> Effect:
        """Return the effect with these settings, for an option whose settings change its claim. It is called after `resolve`."""
        return self.effect

    def roundoff(self) -> float:
        """Return the largest relative rounding error of its computations: float32's, unless it rounds more."""
        return 2.0**-24

    def validate(self, run: RunSpec) -> Iterator[str]:
        """Yield the problems that can be found without torch, the model or the data, one line each."""
        return iter(())

    def rules(self, run: RunSpec) -> Iterator[str]:
        """Yield the problems of `validate`, and those of the group's own rules."""
        return self.returned("validate", self.validate(run))

    def advise(self, run: RunSpec) -> Iterator[str]:
        """Yield warnings about settings that work but are probably not intended. They are logged at the start."""
        return iter(())

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        """Yield the problems that need torch or the device to be found, one line each."""
        return iter(())

    def choose(self, trials: Trials, recorded: JsonMapping | None = None) -> Option:
        """Return this option with the settings found by trials, before any rank starts.

        `recorded` has a resumed run's findings.
        """
        return self

    def build(self, context: BuildContext) -> Any:
        """Return the runtime object: a copy of this option, prepared by `setup` for one run.

        The option itself does not change, and can be built again.
        """
        built = self.copied()
        built.setup(context)
        return built

    def setup(self, context: BuildContext) -> None:
        """Prepare this copy for its run. A technique overrides it to create its objects."""


RETURNS: dict[str, tuple[type, str]] = {  # the type that a method must return, and its description
    **dict.fromkeys(("resolve", "choose"), (Option, "return the option: self, or self.with_values(…)")),
    **dict.fromkeys(("validate", "validate_device"), (Iterable, "yield its problems, one line each")),
    "advise": (Iterable, "yield its warnings, one line each"),
}


def needs_extra(package: str, extra: str, setting: str) -> Iterator[str]:
    """Yield a problem if an optional package is not installed."""
    from importlib.util import find_spec

    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # the parent package is missing too
        found = None
    if found is None:
        yield f"{setting} needs the package '{package}', which is not installed: pip install 'drivetrain[{extra}]'"
