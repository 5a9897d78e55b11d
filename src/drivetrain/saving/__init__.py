"""Checkpoints: when a run's state is saved, what is saved, and in which format."""

from drivetrain.saving.options import Best, Last, Saving

__all__ = ["Best", "Last", "Saving"]
