"""Learning-rate schedules: config group `scheduler`. All but plateau are pure functions of the update number."""

from drivetrain.scheduler.base import Scheduler

__all__ = ["Scheduler"]
