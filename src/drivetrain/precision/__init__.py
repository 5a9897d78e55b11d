"""The number formats of a step."""

from drivetrain.precision.base import Precision

__all__ = ["Precision"]
