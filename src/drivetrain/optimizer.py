"""Optimizers: torch's own where it has them, fused by default where it has that, and without the compiler's import."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from drivetrain.lazy import torch
from drivetrain.spec import Momentum, NonNegative, Part, Positive, Run


class Optimizer(Part):
    """The base of every optimizer option: parameter groups, implementation, start.

    `fused` and `foreach` are torch's; null means torch's fused kernels, the fastest measured.
    """

    torch_name: str  # the class in torch.optim

    def __init__(
        self,
        lr: Positive,
        weight_decay: NonNegative,
        decay_norm_and_bias: bool,
        fused: bool | None,
        foreach: bool | None,
        **own: Any,
    ) -> None:
        self.lr, self.weight_decay, self.decay_norm_and_bias = lr, weight_decay, decay_norm_and_bias
        self.fused, self.foreach, self.own = fused, foreach, own

    def check(self, run: Run) -> Iterator[str]:
        if self.fused and self.foreach:
            yield "optimizer.fused=true and optimizer.foreach=true exclude each other: set one of them to null"

    def build(self, model: torch.nn.Module, lr_factor: float = 1.0) -> torch.optim.Optimizer:
        """The optimizer over the model's trainable parameters, at `lr × lr_factor`."""
        cls = getattr(torch.optim, self.torch_name)
        without_compiler(cls)
        fused = self.fused if self.fused is not None or self.foreach is not None else True
        optimizer = cls(
            parameter_groups(model, self.weight_decay, self.decay_norm_and_bias),
            lr=self.lr * lr_factor, fused=fused, foreach=self.foreach, **self.own,
        )  # fmt: skip
        eager_step(optimizer)
        return optimizer


class Sgd(Optimizer):
    """Stochastic gradient descent with momentum (torch.optim.SGD)."""

    torch_name = "SGD"

    def __init__(
        self,
        lr: Positive = 0.1,
        momentum: Momentum = 0.9,
        nesterov: bool = True,
        weight_decay: NonNegative = 5e-4,
        decay_norm_and_bias: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, decay_norm_and_bias, fused, foreach, momentum=momentum, nesterov=nesterov)

    def check(self, run: Run) -> Iterator[str]:
        yield from super().check(run)
        if self.own["nesterov"] and not self.own["momentum"]:
            yield "optimizer.nesterov=true needs momentum: set optimizer.momentum above 0 or optimizer.nesterov=false"


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019; torch.optim.AdamW)."""

    torch_name = "AdamW"

    def __init__(
        self,
        lr: Positive = 1e-3,
        beta1: Momentum = 0.9,
        beta2: Momentum = 0.999,
        eps: Positive = 1e-8,
        weight_decay: NonNegative = 0.01,
        decay_norm_and_bias: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, decay_norm_and_bias, fused, foreach, betas=(beta1, beta2), eps=eps)


def parameter_groups(model: torch.nn.Module, weight_decay: float, decay_norm_and_bias: bool) -> list[dict[str, Any]]:
    """Trainable parameters with and without decay: vectors and scalars are norms and biases."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if decay_norm_and_bias or p.ndim > 1]
    rest = [p for p in trainable if not decay_norm_and_bias and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def without_compiler(cls: type[torch.optim.Optimizer]) -> None:
    """Keep torch.optim from importing the compiler, 1.4 s of every start.

    Its methods import torch._dynamo at their first call only to mark themselves as not to be compiled;
    we never compile them, so each is marked with itself. Where torch changes this, the import just happens.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(cls, name), "__wrapped__", None)
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
