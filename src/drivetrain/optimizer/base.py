"""What all optimizers share: parameter groups, the choice of an implementation, a lean step, a start without the compiler."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.optimizer.groups import flat, parameter_groups
from drivetrain.optimizer.knobs import Knobs

Form = Literal["fused", "foreach", "loop"]
CACHED = 1 << 20  # elements; on a CPU more than these leave the cache between two multi-tensor operations, which then lose


@dataclass(kw_only=True, eq=False)
class Optimizer(Knobs):
    """The base of every optimizer option.

    `fused` is a form with one kernel for all, `foreach` one with many parameters per operation; null is the fastest there
    is (the fused one; without it the foreach one, but on a CPU only for models that fit its cache), false for both the
    plain loop. An option names its own knobs as fields and makes the optimizer in `make`.
    """

    fused_on: ClassVar[tuple[str, ...]] = ()  # the devices on which it has a fused form
    has_foreach: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False  # an element's update needs that element's gradient alone: shards do as well
    in_chunks: ClassVar[bool] = False  # its foreach form works on what a CPU's cache holds (drivetrain.optimizer.algorithms.flat)

    def validate(self, run: RunSpec) -> Iterator[str]:
        name = run.named("optimizer")
        if self.fused and self.foreach:
            yield "optimizer.fused=true and optimizer.foreach=true exclude each other: set one of them to null"
        elif self.fused and not self.fused_on:
            yield f"optimizer.fused=true, but {name} has no fused form: set optimizer.fused=null, it takes the fastest there is"
        elif self.foreach and not self.has_foreach:
            yield f"optimizer.foreach=true, but {name} has no multi-tensor form: set optimizer.foreach=null"
        yield from self._lr_of_problems()

    def _lr_of_problems(self) -> Iterator[str]:
        multiples = flat(self.lr_multipliers)
        for pattern, multiple in multiples.items():
            if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not multiple > 0:
                yield f"optimizer.lr_multipliers: {pattern}={multiple}: a multiple of the learning rate must be a number > 0"
            if "[" in pattern:
                yield f"optimizer.lr_multipliers: {pattern!r}: patterns know * and ?, not brackets"
            inner = [other for other in multiples if other.startswith(f"{pattern}.")]
            if inner:  # YAML's nested keys could not say both
                yield (
                    f"optimizer.lr_multipliers: {pattern} and {inner[0]} are one inside the other: "
                    f"write '{pattern}.*' for the outer one"
                )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        kind = run.runtime.kind()
        if self.fused and self.fused_on and not self.has_fused(kind):
            yield f"optimizer.fused=true: {run.named('optimizer')} has no fused form on {kind}: set optimizer.fused=null"

    def build(self, model: torch.nn.Module, lr_factor: float = 1.0) -> torch.optim.Optimizer:
        """The optimizer over the model's trainable parameters, at `lr × lr_factor`."""
        groups = parameter_groups(model, self, self.lr * lr_factor, self.tags(model))
        parameters = [p for g in groups for p in g["params"]]
        without_compiler()
        self.optimizer = self.make(groups, self.form(parameters[0].device.type, sum(p.numel() for p in parameters)))
        names = {id(p): name for name, p in model.named_parameters()}
        for group in self.optimizer.param_groups:  # saved with the state, which says to whom it belongs
            group["param_names"] = [names[id(p)] for p in group["params"]]
        eager_step(self.optimizer)
        return self.optimizer

    def make(self, groups: list[dict[str, Any]], form: Form) -> torch.optim.Optimizer:
        """The optimizer over these groups, each with its own lr and weight_decay."""
        raise NotImplementedError

    def tags(self, model: torch.nn.Module) -> Any:
        """A function (parameter's name, whether it decays) → what else its group says."""
        return lambda name, decayed: {}

    def has_fused(self, device: str) -> bool:
        """Whether there is a fused form on this type of device."""
        return device in self.fused_on

    def form(self, device: str, elements: int) -> Form:
        """The implementation for a model of so many elements."""
        if self.fused or (self.fused is None and not self.foreach and self.has_fused(device)):
            return "fused"
        cached = device != "cpu" or self.in_chunks or elements <= CACHED
        if self.foreach or (self.foreach is None and self.has_foreach and cached):
            return "foreach"
        return "loop"

    def own(self) -> dict[str, Any]:
        """The knobs that are this option's alone, under torch's names."""
        common = {f.name for f in fields(Knobs)}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}
        if "beta2" in values:
            values["betas"] = (values.pop("beta1"), values.pop("beta2"))
        return values

    def eval_weights(self) -> AbstractContextManager[None]:
        """While it lasts, the weights to evaluate and to save stand in the model: here those that are trained."""
        return nullcontext()


def without_compiler() -> None:
    """Keep torch.optim from importing the compiler, 1.4 s of every start.

    Its methods import torch._dynamo at their first call only to mark themselves as not to be compiled;
    we never compile them, so each is marked with itself. Where torch changes this, the import just happens.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            setattr(method, "__dynamo_disable", getattr(method, "__dynamo_disable", method))


def eager_step(optimizer: torch.optim.Optimizer) -> None:
    """Step through the optimizer's own arithmetic alone.

    torch wraps it in a profiler range, hooks and the compiler's graph breaks: some 10 µs a step, and the import.
    """
    arithmetic = inspect.unwrap(type(optimizer).step)

    def step() -> None:
        with torch.no_grad():
            arithmetic(optimizer)

    optimizer.step = step  # type: ignore[method-assign, assignment]
