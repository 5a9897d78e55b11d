"""The loss that is trained, and the sums from which an evaluation computes its metrics: config group `loss`."""

from drivetrain.loss.base import Loss

__all__ = ["Loss"]
