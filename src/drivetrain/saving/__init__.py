"""Saving a run's state: when, what, and in which format."""

from drivetrain.saving.options import Best, Last, Saving

__all__ = ["Best", "Last", "Saving"]
