"""Compilation of the model, or of the whole step. Evaluation and saving always use the uncompiled model."""

from drivetrain.compile.base import Compile
from drivetrain.compile.cudagraph import CudaGraph
from drivetrain.compile.inductor import Inductor, Regional
from drivetrain.compile.jit import Jit
from drivetrain.compile.step_graph import StepGraph, eager_only_settings

__all__ = ["Compile", "CudaGraph", "Inductor", "Jit", "Regional", "StepGraph", "eager_only_settings"]
