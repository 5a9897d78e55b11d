"""Edits of the model before training: config group `surgery`, a list of options that are applied in the order given."""

from drivetrain.surgery.base import Edit

__all__ = ["Edit"]
