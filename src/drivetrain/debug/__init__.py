"""Debugging options, off by default."""

from drivetrain.debug.base import Anomaly, Debug, Fast

__all__ = ["Anomaly", "Debug", "Fast"]
