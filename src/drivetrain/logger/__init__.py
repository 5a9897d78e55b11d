"""Where metrics are written: config group `logger`, a list of options."""

from drivetrain.logger.base import Logger
from drivetrain.logger.files import Files
from drivetrain.logger.tensorboard import TensorBoard

__all__ = ["Files", "Logger", "TensorBoard"]
