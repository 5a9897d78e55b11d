"""Where metrics go."""

from drivetrain.logger.base import Files, Logger, TensorBoard

__all__ = ["Files", "Logger", "TensorBoard"]
