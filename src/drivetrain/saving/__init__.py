"""Checkpoints: when a run's state is saved, what is saved, and in which format."""

from drivetrain.saving.options import Saving

__all__ = ["Saving"]
