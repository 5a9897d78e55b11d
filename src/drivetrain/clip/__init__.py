"""Bounds on the gradients of an update."""

from drivetrain.clip.base import Agc, Clip, Norm, Value

__all__ = ["Agc", "Clip", "Norm", "Value"]
