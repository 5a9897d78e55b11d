"""Activation checkpointing: less memory for more computation."""

from drivetrain.checkpointing.base import Blocks, Budget, Checkpointing, EveryK, Offload, Selective

__all__ = ["Blocks", "Budget", "Checkpointing", "EveryK", "Offload", "Selective"]
