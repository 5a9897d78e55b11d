"""A moving average of the weights: config group `ema`."""

from drivetrain.ema.base import Average, Ema
from drivetrain.ema.post_hoc import PostHoc
from drivetrain.ema.swa import Swa

__all__ = ["Average", "Ema", "PostHoc", "Swa"]
