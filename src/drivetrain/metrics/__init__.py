"""The metrics that an evaluation computes beside the loss's own figures: config group `metrics`, a list of options."""

from drivetrain.metrics.base import Metric

__all__ = ["Metric"]
