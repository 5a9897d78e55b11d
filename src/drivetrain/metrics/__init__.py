"""The metrics of an evaluation in addition to the loss's figures: config group `metrics`, a list of options."""

from drivetrain.metrics.base import Metric

__all__ = ["Metric"]
