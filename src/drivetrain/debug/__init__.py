"""Debugging aids: off in training, one switch when wanted."""

from drivetrain.debug.base import Anomaly, Debug, Fast

__all__ = ["Anomaly", "Debug", "Fast"]
