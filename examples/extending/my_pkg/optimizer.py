"""optimizer=sign_sgd"""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Momentum, NonNegative, Positive
from drivetrain.optimizer import Optimizer


@dataclass(kw_only=True, eq=False)
class SignSgdOption(Optimizer):
    """The sign of the momentum."""

    elementwise = True  # an element's update needs only that element's gradient, so fsdp may split a weight anywhere
    lr: Positive = 0.001
    weight_decay: NonNegative = 0.0
    momentum: Momentum = 0.9

    def make(self, groups: list[dict[str, object]], implementation: str) -> torch.optim.Optimizer:
        from my_pkg.sign_sgd import SignSgd  # imports torch: not before the run is built

        return SignSgd(groups, self.lr, self.momentum, self.weight_decay)
