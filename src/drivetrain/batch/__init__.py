"""Batch size: the number of samples per update, and their split into micro-batches."""

from drivetrain.batch.base import Batch

__all__ = ["Batch"]
