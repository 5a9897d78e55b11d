"""metrics=[own]: a metric of the user's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from drivetrain.core.errors import OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.options.allowed import PLAIN_NAME, Arguments, Entries, Name, Text
from drivetrain.core.options.groups import Better
from drivetrain.core.options.option import BuildContext, RunSpec
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.target_kinds import DESCRIPTIONS
from drivetrain.core.step.trees import Tree
from drivetrain.core.user import code as user_code
from drivetrain.core.user.call import ProgressView, UserCall
from drivetrain.metrics.base import DIRECTIONS, Metric

Direction = Literal["min", "max"]
OF_EACH_BATCH = ("input", "batch", "model", "progress")


logger = logging.getLogger(__name__)


class OwnMetric(Metric):
    """The class or function `target` (a dotted name) of a package listed in `trust`.

    A torchmetrics.Metric class is made with `kwargs` (and `classes` or `num_classes`, if it has parameters of these names) and
    updated with (output, target) of each batch. A function is called once, with the outputs and the targets of the whole set, and
    `kwargs`: so it is exact on any number of ranks, and the outputs of the whole set have to fit on the device. With `mean` it is
    called with each batch and gets the arguments that its parameters name; its values are averaged over samples. All give a
    number, or a dict of numbers by name; `better` names those that may rank models.
    """

    machine_local_keys = ("target",)
    name: str | None  # type: ignore[assignment]
    takes = tuple(DESCRIPTIONS)

    def __init__(
        self,
        target: str | None = None,
        kwargs: Arguments | None = None,
        name: Name | None = None,
        better: Direction
        | Annotated[dict[str, Direction], Entries(PLAIN_NAME, ((PLAIN_NAME, Text("min|max", "min or max")),))]
        | None = None,
        mean: bool = False,
    ) -> None:
        self.target, self.kwargs = target, kwargs or {}
        self.name, self.better, self.mean = name, better, mean  # type: ignore[assignment]

    @property
    def tried_on(self) -> int:
        return 2 if self.mean else 64

    @property
    def figure(self) -> str:
        """The name of its figure, if it returns one number."""
        return self.name or str(self.target).rpartition(".")[2]

    @property
    def directions(self) -> dict[str, Better | None]:
        given: Any = self.better
        if isinstance(given, dict):
            return {name: DIRECTIONS[direction] for name, direction in given.items()}
        return {self.figure: None if given is None else DIRECTIONS[given]}

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.target:
            yield OperatorGives(
                "metrics=[own] needs metrics.own.target, the dotted name of your class or function, such as my_pkg.MyMetric"
            )
        else:
            yield from user_code.trust_problems(f"metrics.own.target={self.target}", self.target, run.values["trust"])

    def create(self, context: BuildContext) -> Any:
        from drivetrain.metrics.states import Collected, Sums, unlike_shapes

        setting = f"metrics.own.target={self.target}"
        target = user_code.load(setting, str(self.target))
        self._function = not isinstance(target, type)
        if self._function:
            self._call = UserCall(setting, target, self.kwargs, offers=("output", "target", *OF_EACH_BATCH))
            if more := [name for name in OF_EACH_BATCH if name in self._call.needs and not self.mean]:
                raise UserError(
                    f"{setting} names `{more[0]}`, and only a function called with each batch gets that: set "
                    "metrics.own.mean=true, if its value is a mean over samples"
                )
            lengths = [each.source.lengths for sets in context.evaluated.values() for each in sets.values()]
            differ = any(n is not None and len(n.unique()) > 1 for n in lengths)
            if not self.mean and context.run.data.targets == "tokens" and differ:
                raise UserError(unlike_shapes(f"texts of {context.run.named('data')} differ in length"))
            self._context, self._names = context, list[str]()
            length = (context.horizon.updates, context.run.values["epochs"])
            self._progress = ProgressView(context.progress, *length, training=False)
            return Sums() if self.mean else Collected()
        # A derived class has already imported it; nobody else needs the import.
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is None or not issubclass(target, torchmetrics.Metric):
            raise UserError(f"{setting} is no torchmetrics.Metric: derive from it, or name a function")
        offered = {"classes": context.data.classes, "num_classes": context.data.classes}
        made = user_code.make(setting, target, self.kwargs, offered)
        self._call = UserCall(f"the method update of {setting}", made.update, offers=("output", "target", "input", "batch"))
        return made

    @property
    def needs_output(self) -> bool:
        return "output" in self._call.needs or bool(self._call.positional)

    def update(self, output: Tree, target: Tree, batch: MicroBatch | None = None) -> None:
        inputs = None if batch is None else batch.x
        if not self._function:
            self._call(output=output, target=target, input=inputs, batch=batch)
        elif not self.mean:
            self.state.update(output, target)
        else:
            model = self._context.model if "model" in self._call.needs else None
            found = self._named(
                self._call(output=output, target=target, input=inputs, batch=batch, model=model, progress=self._progress)
            )
            self._names = list(found)
            samples, device = trees.length(target), self._context.device
            row = [*(samples * value for value in found.values()), samples]
            self.state.update(torch.tensor(row, dtype=sum_dtype(device), device=device))

    def check(self, output: Tree, target: Tree, batch: MicroBatch) -> None:
        super().check(output, target, batch)
        if self._function and not self.mean:
            try:
                found = self._named(self._call(output=output, target=target))
            except UserError:
                raise
            except Exception as error:  # it may be undefined for few samples
                if isinstance(output, torch.Tensor) and len(output) != (samples := trees.length(target)):
                    raise UserError(
                        f"metrics.own.target={self.target} gets {len(output)} outputs for {samples} samples, and cannot be "
                        f"computed of them ({type(error).__name__}): set metrics=[]"
                    ) from error
                logger.warning(
                    "metrics.own.target=%s cannot be tried on %d samples (%s: %s): it is first computed in the first evaluation",
                    self.target, trees.length(target), type(error).__name__, str(error).partition("\n")[0],
                )  # fmt: skip
                return
            self._names = list(found)
        if self._function and (
            missing := [name for name, better in self.directions.items() if better and name not in self._names]
        ):
            raise UserError(
                f"metrics.own.better is of {', '.join(missing)}, and metrics.own.target={self.target} gives "
                f"{', '.join(self._names)}"
            )

    def figures(self, computed: Any) -> dict[str, float]:
        if not self._function:
            return self._named(computed)
        if not self.mean:
            output, target = computed
            return self._named(self._call(output=output, target=target))
        *totals, samples = computed.tolist()
        names = self._context.parallel.broadcast_object(self._names)  # a rank without a batch knows none
        return {name: total / samples for name, total in zip(names, totals, strict=True)}

    def _named(self, value: Any) -> dict[str, float]:
        """Return the figures by name. Raises UserError if they are not numbers."""
        found = value if isinstance(value, dict) else {self.figure: value}
        try:
            return {str(name): float(number) for name, number in found.items()}
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"metrics.own.target={self.target} gives {type(value).__name__}: it must give a number, or a dict of numbers"
            ) from None
