"""Compiling the model, or the whole step. Evaluation and saving always keep the plain model."""

from drivetrain.compile.base import Compile
from drivetrain.compile.cudagraph import CudaGraph
from drivetrain.compile.inductor import Inductor, Regional
from drivetrain.compile.jit import Jit
from drivetrain.compile.step_graph import StepGraph, op_by_op

__all__ = ["Compile", "CudaGraph", "Inductor", "Jit", "Regional", "StepGraph", "op_by_op"]
