"""Optimizers on flat vectors: LARS, LAMB, NVLAMB and NovoGrad for large batches, Lion, and schedule-free AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Lt

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Momentum, NonNegative, Positive, RunSpec
from drivetrain.optimizer.base import Implementation, Optimizer
from drivetrain.optimizer.groups import GroupSettings


@dataclass(kw_only=True, eq=False)
class Layerwise(Optimizer):
    """Applies trust ratios to the parameters that would decay, even if `weight_decay` is 0: not to norms and biases."""

    by_norms = True
    has_foreach = in_chunks = True

    def group_settings(self, model: torch.nn.Module) -> GroupSettings:
        return lambda name, decayed: {"adapt": decayed}


@dataclass(kw_only=True, eq=False)
class Lars(Layerwise):
    """Layer-wise adaptive rate scaling (You et al. 2017): optimizer/algorithms/layerwise_optimizer.py has the formulas."""

    lr: Positive = 5.0
    weight_decay: NonNegative = 1e-4
    momentum: Momentum = 0.9
    nesterov: bool = False
    trust: Positive = 0.001

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms.layerwise_optimizer import Lars

        return Lars(groups, loop=implementation == "loop", **self.arguments())


@dataclass(kw_only=True, eq=False)
class Lamb(Layerwise):
    """Layer-wise adaptive moments (You et al. 2020): drivetrain.optimizer.algorithms.layerwise_optimizer has the formulas."""

    fused_on = ("cpu", "cuda")
    lr: Positive = 0.02
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-6
    bias_correction: bool = True

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms.layerwise_optimizer import Lamb

        arguments = {"max_grad_norm": None, **self.arguments()}
        return Lamb(groups, fused=implementation == "fused", loop=implementation == "loop", **arguments)


@dataclass(kw_only=True, eq=False)
class NvLamb(Lamb):
    """NVIDIA's LAMB: first divides all gradients by max(1, their global norm / `max_grad_norm`), then adapts every parameter."""

    max_grad_norm: Positive = 1.0

    def group_settings(self, model: torch.nn.Module) -> GroupSettings:
        return lambda name, decayed: {"adapt": True}

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.clip.active:
            yield f"{run.named('optimizer')} bounds the norm of the gradients itself: {run.named('clip')} clips them before that"


@dataclass(kw_only=True, eq=False)
class NovoGrad(Optimizer):
    """Layer-wise second moments (Ginsburg et al. 2019): drivetrain.optimizer.algorithms.layerwise_optimizer has the formulas."""

    by_norms = True
    has_foreach = in_chunks = True
    lr: Positive = 0.02
    weight_decay: NonNegative = 1e-3
    beta1: Momentum = 0.95
    beta2: Momentum = 0.98
    eps: Positive = 1e-8
    grad_averaging: bool = False

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms.layerwise_optimizer import NovoGrad

        return NovoGrad(groups, loop=implementation == "loop", **self.arguments())


@dataclass(kw_only=True, eq=False)
class Lion(Optimizer):
    """Evolved sign momentum (Chen et al. 2023): drivetrain.optimizer.algorithms.flat_optimizer has the formulas."""

    decays_by_lr = True
    elementwise = True
    has_foreach = in_chunks = True
    lr: Positive = 0.001
    weight_decay: NonNegative = 0.1
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms import flat_optimizer

        return flat_optimizer.Lion(groups, loop=implementation == "loop", **self.arguments())


@dataclass(kw_only=True, eq=False)
class ScheduleFree(Optimizer):
    """Schedule-free AdamW (Defazio et al. 2024): drivetrain.optimizer.algorithms.flat_optimizer has the formulas.

    The averaged weights are evaluated and saved. BatchNorm's running statistics are those of the trained weights.
    """

    elementwise = True
    decays_by_lr = True
    has_foreach = in_chunks = True
    lr: Positive = 2.5e-3
    weight_decay: NonNegative = 0.01
    beta1: Annotated[float, Gt(0), Lt(1)] = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not run.scheduler.constant:
            yield (
                f"{run.named('optimizer')} averages the weights where others lower the learning rate, and wants it to rise "
                f"or stay, but {run.named('scheduler')} lowers it: set scheduler=constant, with scheduler.warmup as you like"
            )

        if run.parallel.shard_optimizer:
            yield (
                f"{run.named('optimizer')} and parallel.shard_optimizer=true exclude each other (an evaluation wants all "
                "averages, and each rank has some): set it to false, or optimizer=adamw"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.ema.active:
            yield f"{run.named('optimizer')} already evaluates an average: {run.named('ema')} averages the trained weights"

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms import flat_optimizer

        return flat_optimizer.ScheduleFree(groups, loop=implementation == "loop", **self.arguments())

    def eval_weights(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        return optimizer.averaged()  # type: ignore[attr-defined, no-any-return]
