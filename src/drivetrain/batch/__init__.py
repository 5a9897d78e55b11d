"""Batch size: how many samples make one update, and how they are split into micro-batches."""

from drivetrain.batch.base import Accumulate, Auto, Batch
from drivetrain.batch.bucketed import Bucketed

__all__ = ["Accumulate", "Auto", "Batch", "Bucketed"]
