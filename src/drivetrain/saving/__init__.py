"""Checkpoints: the times, the content and the format of a saved state."""

from drivetrain.saving.options import Saving

__all__ = ["Saving"]
