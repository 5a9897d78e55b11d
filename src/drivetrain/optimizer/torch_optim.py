"""The optimizers of torch.optim."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from drivetrain.core.lazy import torch
from drivetrain.core.machine import torch_patches
from drivetrain.core.options.option import Momentum, NonNegative, Positive, RunSpec
from drivetrain.core.step.architecture import sparse_parameters
from drivetrain.optimizer.base import Implementation, Optimizer
from drivetrain.optimizer.groups import GroupSettings

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class TorchOptimizer(Optimizer):
    """The base of the options that build a class of torch.optim."""

    has_foreach = True
    torch_name: ClassVar[str]

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        flags = {"foreach": implementation == "foreach"} | ({"fused": implementation == "fused"} if self.fused_on else {})
        return self.algorithm()(groups, **flags, **self.arguments())

    def algorithm(self) -> Callable[..., torch.optim.Optimizer]:
        """The class that makes the updates."""
        made: type[torch.optim.Optimizer] = getattr(torch.optim, self.torch_name)
        return made


@dataclass(kw_only=True, eq=False)
class Sgd(TorchOptimizer):
    """Stochastic gradient descent with momentum (torch.optim.SGD)."""

    decays_by_lr = True
    elementwise = True
    torch_name = "SGD"
    fused_on = ("cpu", "cuda", "xpu", "mps")
    lr: Positive = 0.1
    weight_decay: NonNegative = 5e-4
    momentum: Momentum = 0.9
    nesterov: bool = True

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        optimizer = super().make(groups, implementation)
        if implementation == "fused" and self.momentum:
            # torch's fused kernel fails if some parameters get their first gradient later than others. A momentum buffer of
            # zeros makes the same first step.
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.nesterov and not self.momentum:
            yield "optimizer.nesterov=true needs momentum: set optimizer.momentum above 0 or optimizer.nesterov=false"


@dataclass(kw_only=True, eq=False)
class Adam(TorchOptimizer):
    """Adam with weight decay added to the gradient (Kingma & Ba 2015; torch.optim.Adam)."""

    elementwise = True
    torch_name = "Adam"
    states = 2
    fused_on = ("cpu", "cuda", "xpu", "mps")
    lr: Positive = 0.003
    weight_decay: NonNegative = 0.0
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8
    amsgrad: bool = False


@dataclass(kw_only=True, eq=False)
class AdamW(TorchOptimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019; torch.optim.AdamW)."""

    decays_by_lr = True
    elementwise = True
    torch_name = "AdamW"
    states = 2
    fused_on = ("cpu", "cuda", "xpu", "mps")
    lr: Positive = 0.003
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8


@dataclass(kw_only=True, eq=False)
class SparseAdam(AdamW):
    """AdamW, and Adam without decay for the embedding rows read by an update (torch.optim.SparseAdam).

    It applies to weights with sparse gradients, as from `Embedding(sparse=True)`. Other rows keep their moments.
    """

    def group_settings(self, model: torch.nn.Module) -> GroupSettings:
        if names := {*sparse_parameters(model).values()}:
            logger.info("SparseAdam: %s; AdamW: the rest", ", ".join(sorted(names)))
        else:
            logger.warning(
                "optimizer=sparse_adam is AdamW alone, because no weight has sparse gradients: set sparse=True in an Embedding"
            )
        return lambda name, decayed: {"sparse": True, "weight_decay": 0.0} if name in names else {"sparse": False}

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms.muon import ChainedOptimizer

        sparse, dense = (
            [{key: value for key, value in group.items() if key != "sparse"} for group in groups if group["sparse"] == is_so]
            for is_so in (True, False)
        )
        known = {key: value for key, value in self.arguments().items() if key != "weight_decay"}
        if not sparse:
            return super().make(dense, implementation)
        members = [torch.optim.SparseAdam(sparse, **known), *([super().make(dense, implementation)] if dense else [])]
        for member in members:
            torch_patches.remove_step_wrappers(member)
        return ChainedOptimizer(*members)


@dataclass(kw_only=True, eq=False)
class RmsProp(TorchOptimizer):
    """Gradients divided by the root of a moving average of their squares (Tieleman & Hinton 2012; torch.optim.RMSprop)."""

    elementwise = True
    torch_name = "RMSprop"
    states = 1
    lr: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    alpha: Momentum = 0.99
    eps: Positive = 1e-8
    momentum: Momentum = 0.0
    centered: bool = False


@dataclass(kw_only=True, eq=False)
class Adagrad(TorchOptimizer):
    """Gradients divided by the root of the sum of all their squares (Duchi et al. 2011; torch.optim.Adagrad)."""

    elementwise = True
    torch_name = "Adagrad"
    states = 1
    fused_on = ("cpu", "cuda", "xpu", "mps")
    lr: Positive = 0.02
    weight_decay: NonNegative = 0.0
    lr_decay: NonNegative = 0.0
    initial_accumulator_value: NonNegative = 0.0
    eps: Positive = 1e-10


@dataclass(kw_only=True, eq=False)
class Adafactor(TorchOptimizer):
    """Adam with a second moment factored into rows × columns, which saves memory (Shazeer & Stern 2018; torch.optim.Adafactor).

    The update is clipped to a root mean square of `d`, then scaled by min(lr, 1/√t) and by the parameter's root mean square,
    which counts as at least `eps2`. The last two dimensions are factored; those of a convolution are its kernel's height and
    width, which saves little. On a GPU, torch's implementation waits for the device once for each parameter and step.
    """

    decays_by_lr = True
    by_parameter = True
    torch_name = "Adafactor"
    step_waits = "torch's implementation reads the root mean square of each parameter"
    lr: Positive = 0.03
    weight_decay: NonNegative = 0.0
    beta2_decay: float = -0.8
    eps1: Positive | None = None
    eps2: NonNegative = 1e-3
    d: Positive = 1.0

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.beta2_decay > 0:
            yield f"optimizer.beta2_decay={self.beta2_decay} must be ≤ 0: at step t the second moment decays by 1 - t^beta2_decay"
        if self.d < 1:
            yield f"optimizer.d={self.d} must be ≥ 1: it is the root mean square to which the update is clipped"

    def arguments(self) -> dict[str, Any]:
        values = super().arguments()
        eps = (values.pop("eps1"), values.pop("eps2"))
        return {**values, "eps": eps}
