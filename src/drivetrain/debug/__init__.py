"""Debugging options, off by default."""

from drivetrain.debug.base import Debug

__all__ = ["Debug"]
