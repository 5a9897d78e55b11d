"""Parallel strategies: one process or many, which split the batch, the weights or the model."""

from drivetrain.parallel.base import Parallel
from drivetrain.parallel.ddp import Ddp
from drivetrain.parallel.environment import launched, world_of_environment
from drivetrain.parallel.fsdp import Fsdp
from drivetrain.parallel.onehost import Dp, Split
from drivetrain.parallel.pipeline import Pipeline
from drivetrain.parallel.tensor import Tensor

__all__ = ["Ddp", "Dp", "Fsdp", "Parallel", "Pipeline", "Split", "Tensor", "launched", "world_of_environment"]
