"""optimizer=apex_*: the fused optimizers of NVIDIA's apex."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from drivetrain.core.lazy import torch
from drivetrain.core.option import Momentum, NonNegative, Positive, RunSpec
from drivetrain.optimizer.base import Implementation, Optimizer


@dataclass(kw_only=True, eq=False)
class Apex(Optimizer):
    """The base of the fused optimizers of apex.optimizers, for CUDA only. A subclass has the hyperparameters of one of them."""

    apex_name: ClassVar[str]
    alternative: ClassVar[str]  # the most similar option without apex
    fused_on = ("cuda",)
    has_foreach = False

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        name = run.named("optimizer")
        if find_spec("apex") is None:
            yield (
                f"{name} needs NVIDIA's apex, which is not installed (it is built from github.com/NVIDIA/apex): "
                f"set optimizer={self.alternative} instead"
            )
        if self.fused is False:
            yield (
                f"optimizer.fused=false, but {name} has a fused implementation only: "
                f"set optimizer={self.alternative} optimizer.fused=false"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        name = run.named("optimizer")
        if run.runtime.device_type() != "cuda":
            yield f"{name} runs on CUDA only, and this run is on {run.runtime.device_type()}: set optimizer={self.alternative}"
            return
        try:
            from apex import optimizers
        except ImportError as error:
            yield f"{name}: apex cannot be imported ({error}): set optimizer={self.alternative}"
            return
        if not hasattr(optimizers, self.apex_name):
            yield f"{name}: this apex has no optimizers.{self.apex_name}: set optimizer={self.alternative}"

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from apex import optimizers

        return getattr(optimizers, self.apex_name)(groups, **self.arguments())


@dataclass(kw_only=True, eq=False)
class ApexAdam(Apex):
    """apex.optimizers.FusedAdam. With `adam_w_mode` the weight decay is decoupled from the gradient, as AdamW's is."""

    decays_by_lr = True
    apex_name, alternative = "FusedAdam", "adamw"
    lr: Positive = 0.003
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8
    adam_w_mode: bool = True


@dataclass(kw_only=True, eq=False)
class ApexSgd(Apex):
    """apex.optimizers.FusedSGD."""

    decays_by_lr = True
    apex_name, alternative = "FusedSGD", "sgd"
    lr: Positive = 0.1
    weight_decay: NonNegative = 5e-4
    momentum: Momentum = 0.9
    nesterov: bool = True


@dataclass(kw_only=True, eq=False)
class ApexLamb(Apex):
    """apex.optimizers.FusedLAMB. With `use_nvlamb` the parameters that do not decay are adapted too."""

    apex_name, alternative = "FusedLAMB", "nvlamb"
    lr: Positive = 0.02
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-6
    max_grad_norm: Positive = 1.0
    use_nvlamb: bool = False


@dataclass(kw_only=True, eq=False)
class ApexNovoGrad(Apex):
    """apex.optimizers.FusedNovoGrad. Its second moment starts at the norm of the first gradient; with `init_zero` at zero."""

    apex_name, alternative = "FusedNovoGrad", "novograd"
    lr: Positive = 0.02
    weight_decay: NonNegative = 1e-3
    beta1: Momentum = 0.95
    beta2: Momentum = 0.98
    eps: Positive = 1e-8
    grad_averaging: bool = False
    init_zero: bool = False
