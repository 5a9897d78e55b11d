"""Optimizers: config group `optimizer`. torch's own, those of drivetrain.optimizer.algorithms, timm's and apex's."""

from drivetrain.optimizer.base import Optimizer

__all__ = ["Optimizer"]
