"""When a run ends before its last epoch: config group `stop`."""

from drivetrain.stop.base import Early, Stop

__all__ = ["Early", "Stop"]
