"""The destinations of metrics: config group `logger`, a list of options."""

from drivetrain.logger.base import Logger, numbers

__all__ = ["Logger", "numbers"]
