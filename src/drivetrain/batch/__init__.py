"""Batch size: how many samples make one update, and how they are split into micro-batches."""

from drivetrain.batch.base import Accumulate, Auto, Batch
from drivetrain.batch.bucketed import Bucketed
from drivetrain.batch.critical import Critical

__all__ = ["Accumulate", "Auto", "Batch", "Bucketed", "Critical"]
