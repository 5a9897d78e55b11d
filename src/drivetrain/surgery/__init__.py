"""Edits of the model before training."""

from drivetrain.surgery.base import ChannelsLast, Edit, FusedNorm, NoBiasBeforeNorm, SyncBn, apply_all, own_statistics

__all__ = ["ChannelsLast", "Edit", "FusedNorm", "NoBiasBeforeNorm", "SyncBn", "apply_all", "own_statistics"]
