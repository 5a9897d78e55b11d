"""The loss that is trained, and the sums from which an evaluation computes its metrics: config group `loss`."""

from drivetrain.loss.base import Loss
from drivetrain.loss.classification import CrossEntropy
from drivetrain.loss.language import NextToken

__all__ = ["CrossEntropy", "Loss", "NextToken"]
