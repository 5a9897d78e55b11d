"""Parallel strategies: one process, or many that split the batch, the weights or the model."""

from drivetrain.parallel.base import Parallel

__all__ = ["Parallel"]
