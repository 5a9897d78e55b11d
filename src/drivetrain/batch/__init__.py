"""How many samples make one update, and into which micro-batches they are split."""

from drivetrain.batch.base import Accumulate, Auto, Batch
from drivetrain.batch.bucketed import Bucketed

__all__ = ["Accumulate", "Auto", "Batch", "Bucketed"]
