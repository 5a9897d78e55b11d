"""optimizer=shampoo: gradients multiplied by inverse roots of their second moments along each dimension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, Momentum, NonNegative, Positive, RunSpec, needs_extra
from drivetrain.optimizer.base import Implementation, Optimizer

BlockSize = Annotated[int, Ge(8), Le(8192)]  # smaller ones are thousands of matrices for each weight, each with a root of its own


@dataclass(kw_only=True, eq=False)
class Shampoo(Optimizer):
    """Shampoo in blocks with grafting (Gupta et al. 2018, Anil et al. 2020), as pytorch_optimizer's ScalableShampoo has it.

    The direction of a weight's update is Shampoo's, and its length that of the grafted method. Vectors, the first `start` - 1
    updates, and weights with a dimension beyond `max_precondition_dim` are updated by the grafted method alone.
    """

    decays_by_lr = True
    by_parameter = True
    has_foreach = False
    states = 2
    step_waits = "the roots are iterated until they are accurate, which the host reads"
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
    """SOAP (Vyas et al. 2024), as pytorch_optimizer has it. The parameter groups are drivetrain's.

    A weight's first gradient only starts its preconditioner: the first update moves nothing.
    """

    decays_by_lr = True
    by_parameter = True
    has_foreach = False
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
