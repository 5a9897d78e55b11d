"""Gradient clipping: config group `clip`."""

from drivetrain.clip.base import Agc, Clip, Norm, Value

__all__ = ["Agc", "Clip", "Norm", "Value"]
