"""Activation checkpointing: less memory for more computation."""

from drivetrain.checkpointing.base import Blocks, Budget, Checkpointing, EveryK, Selective

__all__ = ["Blocks", "Budget", "Checkpointing", "EveryK", "Selective"]
