"""The problem that is solved, in one word: config group `task`."""

from drivetrain.task.base import Task

__all__ = ["Task"]
