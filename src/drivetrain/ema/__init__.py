"""An average of the weights over the updates."""

from drivetrain.ema.base import Average, Ema

__all__ = ["Average", "Ema"]
