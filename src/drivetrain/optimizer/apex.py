"""optimizer=apex_*: the fused optimizers of NVIDIA's apex."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.core.option import Momentum, NonNegative, Positive


@dataclass(kw_only=True, eq=False)
class ApexAdam(Apex):
    """apex.optimizers.FusedAdam. With `adam_w_mode` the weight decay is decoupled from the gradient, as AdamW's is."""

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
