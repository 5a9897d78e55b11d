"""Batch size: how many samples make one update, and how they are split into micro-batches."""

from drivetrain.batch.auto import Auto
from drivetrain.batch.base import Accumulate, Batch
from drivetrain.batch.bucketed import Bucketed
from drivetrain.batch.critical import Critical

__all__ = ["Accumulate", "Auto", "Batch", "Bucketed", "Critical"]
