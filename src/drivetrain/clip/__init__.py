"""Gradient clipping: config group `clip`."""

from drivetrain.clip.base import Clip

__all__ = ["Clip"]
