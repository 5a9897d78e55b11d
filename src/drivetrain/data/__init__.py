"""The data that a run trains on."""

from drivetrain.data.base import Data, Normalize, Source, Splits, Tensors

__all__ = ["Data", "Normalize", "Source", "Splits", "Tensors"]
