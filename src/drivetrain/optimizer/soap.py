"""optimizer=soap: AdamW in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, Momentum, NonNegative, Positive, RunSpec, needs_extra
from drivetrain.optimizer.base import Implementation, Optimizer


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
