"""Checkpoints: when a run's state is saved, its content and its format."""

from drivetrain.saving.options import Saving

__all__ = ["Saving"]
