"""A moving average of the weights: config group `ema`."""

from drivetrain.ema.base import Average, Ema
from drivetrain.ema.swa import Swa

__all__ = ["Average", "Ema", "Swa"]
