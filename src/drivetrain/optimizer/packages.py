"""Optimizers of other packages: NVIDIA's apex, torchao, and pytorch_optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from drivetrain.core.lazy import import_torchao, torch
from drivetrain.core.options.option import Count, Momentum, NonNegative, Positive, RunSpec, needs_extra
from drivetrain.optimizer.base import Implementation, Optimizer


@dataclass(kw_only=True, eq=False)
class Apex(Optimizer):
    """The base of the fused optimizers of apex.optimizers, for CUDA only. A subclass has the hyperparameters of one of them."""

    apex_name: ClassVar[str]
    alternative: ClassVar[str]  # the most similar option without apex
    fused_on = ("cuda",)

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

        found: torch.optim.Optimizer = getattr(optimizers, self.apex_name)(groups, **self.arguments())
        return found


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


@dataclass(kw_only=True, eq=False)
class AdamW8bit(Optimizer):
    """torchao's AdamW with both moments in 8 bits (Dettmers et al. 2022).

    `fused` compiles its arithmetic to one kernel for each shape; otherwise the same operations run one by one.
    """

    decays_by_lr = True
    by_parameter = True
    needs_real_tensors = "a compiler generates and runs its code for a device"
    fused_on = ("cuda",)
    lr: Positive = 3e-3
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from needs_extra("torchao", "torchao", run.named("optimizer"))
        if run.compile.captures_step:
            yield (
                f"{run.named('optimizer')} and {run.named('compile')} exclude each other (a graph of the whole step wants plain "
                "tensors as state, and torchao's are packed): set compile=inductor"
            )

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        import_torchao("torchao.optim")
        from drivetrain.optimizer.torchao_adamw import AdamW8bit

        return AdamW8bit(groups, compiled=implementation == "fused", **self.arguments())


BlockSize = Annotated[int, Ge(8), Le(8192)]  # smaller ones give thousands of matrices per weight, each with its own root


@dataclass(kw_only=True, eq=False)
class Shampoo(Optimizer):
    """Shampoo in blocks with grafting (Gupta et al. 2018, Anil et al. 2020), as in pytorch_optimizer's ScalableShampoo.

    The direction of a weight's update is Shampoo's, and its length is the grafted method's. Vectors, the first `start` - 1
    updates, and weights with a dimension beyond `max_precondition_dim` use only the grafted method.
    """

    decays_by_lr = True
    by_parameter = True
    states = 2
    step_waits = "the roots are iterated to an accuracy that the host reads"
    needs_real_tensors = "the roots are iterated until they are accurate"
    lr: Positive = 0.05
    weight_decay: NonNegative = 1e-4
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    graft: Literal["sgd", "adagrad", "rmsprop", "sign"] = "sgd"
    nesterov: bool = True
    start: Count = 10
    precondition_frequency: Count = 10
    block_size: BlockSize = 512
    max_precondition_dim: Count = 8192
    merge_dims: bool = False
    eps: Positive = 1e-6

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from needs_extra("pytorch_optimizer", "soap", run.named("optimizer"))
        if run.compile.captures_step:
            yield (
                f"{run.named('optimizer')} and {run.named('compile')} exclude each other (the host reads how accurate its roots "
                "are): set compile=inductor"
            )

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

        from drivetrain.optimizer.scalable_shampoo import ScalableShampoo

        kinds = {"sgd": "SGD", "adagrad": "ADAGRAD", "rmsprop": "RMSPROP", "sign": "SQRTN"}
        return ScalableShampoo(
            groups,
            self.lr,
            (self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            decoupled_weight_decay=True,
            start_preconditioning_step=self.start,
            preconditioning_compute_steps=self.precondition_frequency,
            block_size=self.block_size,
            no_preconditioning_for_layers_with_dim_gt=self.max_precondition_dim,
            shape_interpretation=self.merge_dims,
            graft_type=LayerWiseGrafting[kinds[self.graft]],
            nesterov=self.nesterov,
            matrix_eps=self.eps,
        )


@dataclass(kw_only=True, eq=False)
class Soap(Optimizer):
    """pytorch_optimizer's SOAP (Vyas et al. 2024). The parameter groups are drivetrain's.

    A weight's first gradient only starts its preconditioner: the first update moves nothing.
    """

    decays_by_lr = True
    by_parameter = True
    states = 2
    lr: Positive = 0.003
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.95
    beta2: Momentum = 0.95
    shampoo_beta: Momentum | None = None
    precondition_frequency: Count = 10
    max_precondition_dim: Count = 1024
    merge_dims: bool = False
    precondition_1d: bool = False
    eps: Positive = 1e-8

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        yield from needs_extra("pytorch_optimizer", "soap", run.named("optimizer"))

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from pytorch_optimizer import SOAP

        return SOAP(groups, **self.arguments())
