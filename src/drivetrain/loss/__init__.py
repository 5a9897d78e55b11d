"""The loss that is trained, and the sums that an evaluation reports."""

from drivetrain.loss.base import CrossEntropy, Loss, NextToken

__all__ = ["CrossEntropy", "Loss", "NextToken"]
