"""The number formats of a step."""

from drivetrain.precision.base import Amp, Bf16, Precision, Tf32

__all__ = ["Amp", "Bf16", "Precision", "Tf32"]
