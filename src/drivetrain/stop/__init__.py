"""When a run ends before its last epoch: config group `stop`."""

from drivetrain.stop.base import Stop

__all__ = ["Stop"]
