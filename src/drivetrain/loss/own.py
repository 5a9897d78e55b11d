"""loss=own: a function or a module of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.core import user_code
from drivetrain.core.allowed import Arguments
from drivetrain.core.device import sum_dtype
from drivetrain.core.errors import OperatorGives, UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.option import RunSpec
from drivetrain.core.targets import DESCRIPTIONS
from drivetrain.loss.base import Loss
from drivetrain.loss.parted import PartedLoss, Shared

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Batch(NamedTuple):
    """What an own loss gets as `batch`: the inputs and the targets of a micro-batch."""

    x: Any
    y: Any


class Own(PartedLoss):
    """The function or class `target` (a dotted name) of a package that is listed in `trust`; `kwargs` are its arguments.

    It is called as (output, y), or as (output, batch) if its second argument has that name: batch.x and batch.y. It returns the
    mean over the samples, or a mapping of parts: `loss` is then what is trained, or their sum where there is none. To average
    over something else, give it a method `count(y)`, the number of items that its mean is over: the mean is then exact over
    micro-batches and ranks.
    """

    machine_local_keys = ("target",)
    takes = tuple(DESCRIPTIONS)

    def __init__(self, target: str | None = None, kwargs: Arguments | None = None) -> None:
        super().__init__()
        self.target, self.kwargs = target, kwargs or {}

    def validate(self, run: RunSpec) -> Iterator[str]:
        key = f"{self.target_key}.target"
        if not self.target:
            yield OperatorGives(f"loss=own needs {key}, the dotted name of your function or class, such as my_pkg.my_loss")
        else:
            yield from user_code.trust_problems(f"{key}={self.target}", self.target, run.values["trust"])

    def advise(self, run: RunSpec) -> Iterator[str]:
        if not run.parallel.own_forward:
            yield f"the parts of loss=own are not logged with {run.named('parallel')}: only the ranks of its last stage know them"
        if run.data.targets in ("class", "labels", "mask") and not run.metrics and self.target_key == Loss.target_key:
            yield (
                "loss=own reports the loss alone, and models are ranked by it: metrics=[accuracy] reports the share of right "
                "answers too, and select=accuracy ranks by it"
            )

    def setup(self, context: BuildContext) -> None:
        self.running, self.function = {}, self._made(context.device)
        self._logs_parts = context.parallel.own_forward
        second = list(inspect.signature(self.function).parameters)[1:2]
        self._takes_batch = second == ["batch"]
        self._count = getattr(self.function, "count", None)

    def keeps(self) -> dict[str, Any]:
        return {self.target_key: self.function}

    def _made(self, device: torch.device) -> Callable[..., Any]:
        """Import the target; make an object of it if it is a class. Raises UserError."""
        setting = f"{self.target_key}.target={self.target}"
        target = user_code.load(setting, str(self.target))
        if isinstance(target, type):
            made = user_code.make(setting, target, self.kwargs)
        elif self.kwargs:
            raise UserError(f"{setting} is a function, and {self.target_key}.kwargs are for a class: leave them out")
        else:
            made = target
        if isinstance(made, torch.nn.Module):
            if any(p.requires_grad for p in made.parameters()):
                raise UserError(f"{setting} has parameters, and no optimizer sees those of a loss: move them to your model")
            made = made.to(device)
        if not callable(made) or len(inspect.signature(made).parameters) < 2:
            raise UserError(f"{setting} cannot be called as (output, y) or (output, batch)")
        return made

    def count(self, target: Any) -> torch.Tensor:
        if self._count is None:
            return super().count(target)
        counted = self._count(target)
        return torch.as_tensor(counted, dtype=sum_dtype(target.device), device=target.device)

    def training_target(self, batch: MicroBatch) -> Any:
        return Batch(batch.x, batch.y) if self._takes_batch else batch.y

    evaluation_target = training_target

    def __call__(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        if not isinstance(target, Shared):
            return self._parts(output, target)["loss"]
        found = {name: value * target.share for name, value in self._parts(output, target.target).items()}
        for name, value in found.items():
            if name != "loss" and self._logs_parts:
                self.log(name, value)
        return found["loss"]

    def _parts(self, output: torch.Tensor, target: Any) -> dict[str, torch.Tensor]:
        """The named parts, with `loss`. Raises UserError if the function returns anything else."""
        returned = self.function(output, target)
        parts = dict(returned) if isinstance(returned, dict) else {"loss": returned}
        for name, value in parts.items():
            if not isinstance(value, torch.Tensor) or value.dim() > 0:
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                named = f" as {name}" if isinstance(returned, dict) else ""
                raise UserError(
                    f"{self.target_key}.target={self.target} returned {what}{named}: "
                    "return a mean (a tensor without dimensions), or a mapping of several, one of them named loss"
                )
        if "loss" not in parts:
            parts["loss"] = torch.stack(list(parts.values())).sum()
        return parts

    def sums(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        """The loss times its items, and their number (2,)."""
        count = self.count(target.y if isinstance(target, Batch) else target)
        return torch.stack([self._parts(output, target)["loss"].to(count.dtype) * count, count])
