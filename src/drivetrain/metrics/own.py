"""metrics=[own]: a metric of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core import user_code
from drivetrain.core.allowed import Arguments, Name
from drivetrain.core.errors import OperatorGives, UserError
from drivetrain.core.option import RunSpec, needs_extra
from drivetrain.core.selection import Better
from drivetrain.core.targets import DESCRIPTIONS
from drivetrain.metrics.base import DIRECTIONS, EXTRA, Metric

if TYPE_CHECKING:
    import torchmetrics

    from drivetrain.core.context import BuildContext


class Own(Metric):
    """The class or function `target` (a dotted name) of a package that is listed in `trust`.

    A torchmetrics.Metric class is made with `kwargs` (and `classes` or `num_classes`, if it has parameters of these names) and
    updated with (output, target) of each batch. A function is called with the outputs and the targets of the whole set,
    and `kwargs`: so it is exact on any number of ranks, and the outputs of the whole set have to fit on the device. Both give a
    number, or a dict of numbers by name.
    """

    machine_local_keys = ("target",)
    name: str | None  # type: ignore[assignment]
    takes = tuple(DESCRIPTIONS)

    def __init__(
        self,
        target: str | None = None,
        kwargs: Arguments | None = None,
        name: Name | None = None,
        better: Literal["min", "max"] | None = None,
    ) -> None:
        self.target, self.kwargs = target, kwargs or {}
        self.name, self.better = name, better

    @property
    def figure(self) -> str:
        """The name of its figure, where it gives one number."""
        return self.name or str(self.target).rpartition(".")[2]

    @property
    def directions(self) -> dict[str, Better | None]:
        return {self.figure: None if self.better is None else DIRECTIONS[self.better]}

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("torchmetrics", EXTRA, run.named("metrics"))
        if not self.target:
            yield OperatorGives(
                "metrics=[own] needs metrics.own.target, the dotted name of your class or function, such as my_pkg.MyMetric"
            )
        else:
            yield from user_code.trust_problems(f"metrics.own.target={self.target}", self.target, run.values["trust"])

    def create(self, context: BuildContext) -> torchmetrics.Metric:
        import torchmetrics

        from drivetrain.metrics.states import Collected, unlike_shapes

        setting = f"metrics.own.target={self.target}"
        target = user_code.load(setting, str(self.target))
        self._function: Callable[..., Any] | None = None
        if not isinstance(target, type):
            lengths = [each.source.lengths for sets in context.evaluated.values() for each in sets.values()]
            if context.run.data.targets == "tokens" and any(n is not None and len(n.unique()) > 1 for n in lengths):
                raise UserError(unlike_shapes(f"texts of {context.run.named('data')} differ in length"))
            self._function = target
            return Collected()
        if not issubclass(target, torchmetrics.Metric):
            raise UserError(f"{setting} is no torchmetrics.Metric: derive from it, or name a function")
        offered = {"classes": context.data.classes, "num_classes": context.data.classes}
        made: torchmetrics.Metric = user_code.make(setting, target, self.kwargs, offered)
        return made

    def figures(self, computed: Any) -> dict[str, float]:
        value = computed if self._function is None else self._function(*computed, **self.kwargs)
        found = value if isinstance(value, dict) else {self.figure: value}
        try:
            return {str(name): float(number) for name, number in found.items()}
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"metrics.own.target={self.target} gives {type(value).__name__}: it must give a number, or a dict of numbers"
            ) from None
