"""optimizer=lion: the sign of the momentum."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.core.lazy import torch
from drivetrain.core.option import Momentum, NonNegative, Positive
from drivetrain.optimizer.base import Implementation, Optimizer


@dataclass(kw_only=True, eq=False)
class Lion(Optimizer):
    """Evolved sign momentum (Chen et al. 2023): drivetrain.optimizer.algorithms.flat_optimizer has the formulas."""

    decays_by_lr = True
    elementwise = True
    in_chunks = True
    lr: Positive = 0.001
    weight_decay: NonNegative = 0.1
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms import flat_optimizer

        return flat_optimizer.Lion(groups, loop=implementation == "loop", **self.arguments())
