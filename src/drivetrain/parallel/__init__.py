"""Parallel strategies: one process or many, which split the batch, the weights or the model."""

from drivetrain.parallel.base import Parallel

__all__ = ["Parallel"]
