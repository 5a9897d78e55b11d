"""Optimizers for large batches: the size of an update is set layer by layer (drivetrain.optimizer.algorithms)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.option import Momentum, NonNegative, Positive, RunSpec
from drivetrain.optimizer.base import Form, Optimizer


@dataclass(kw_only=True, eq=False)
class Layerwise(Optimizer):
    """Trust ratios for the parameters that decay, whatever `weight_decay` is: not for norms, biases and `no_weight_decay`."""

    in_chunks = True

    def tags(self, model: torch.nn.Module) -> Any:
        return lambda name, decayed: {"adapt": decayed}


@dataclass(kw_only=True, eq=False)
class Lars(Layerwise):
    """Layer-wise adaptive rate scaling (You et al. 2017): drivetrain.optimizer.algorithms.lars states the rules."""

    lr: Positive = 5.0
    weight_decay: NonNegative = 1e-4
    momentum: Momentum = 0.9
    nesterov: bool = False
    trust: Positive = 0.001

    def make(self, groups: list[dict[str, Any]], form: Form) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms.lars import Lars

        return Lars(groups, loop=form == "loop", **self.own())


@dataclass(kw_only=True, eq=False)
class Lamb(Layerwise):
    """Layer-wise adaptive moments (You et al. 2020): drivetrain.optimizer.algorithms.lamb states the rules."""

    fused_on = ("cpu", "cuda")
    lr: Positive = 0.02
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-6
    bias_correction: bool = True

    def make(self, groups: list[dict[str, Any]], form: Form) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms.lamb import Lamb

        return Lamb(groups, fused=form == "fused", loop=form == "loop", **self.own())


@dataclass(kw_only=True, eq=False)
class NvLamb(Lamb):
    """NVIDIA's LAMB: all gradients divided by max(1, their norm / `max_grad_norm`) first, and every parameter adapted."""

    max_grad_norm: Positive = 1.0

    def tags(self, model: torch.nn.Module) -> Any:
        return lambda name, decayed: {"adapt": True}

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.clip.active:
            yield f"{run.named('optimizer')} bounds the gradients' norm itself: {run.named('clip')} comes before that"


@dataclass(kw_only=True, eq=False)
class NovoGrad(Optimizer):
    """Layer-wise second moments (Ginsburg et al. 2019): drivetrain.optimizer.algorithms.novograd states the rules."""

    in_chunks = True
    lr: Positive = 0.02
    weight_decay: NonNegative = 1e-3
    beta1: Momentum = 0.95
    beta2: Momentum = 0.98
    eps: Positive = 1e-8
    grad_averaging: bool = False

    def make(self, groups: list[dict[str, Any]], form: Form) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms.novograd import NovoGrad

        return NovoGrad(groups, loop=form == "loop", **self.own())
