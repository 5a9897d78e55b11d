"""Activation checkpointing: less memory for more computation."""

from drivetrain.checkpointing.base import Checkpointing

__all__ = ["Checkpointing"]
