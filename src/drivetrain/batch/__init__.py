"""Batch size: how many samples make one update, and how they are split into micro-batches."""

from drivetrain.batch.base import Batch

__all__ = ["Batch"]
