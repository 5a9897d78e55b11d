"""The conditions that end a run before its last epoch: config group `stop`."""

from drivetrain.stop.base import Stop

__all__ = ["Stop"]
