"""A moving average of the weights: config group `ema`."""

from drivetrain.ema.base import Average

__all__ = ["Average"]
