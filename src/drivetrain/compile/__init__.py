"""Compiling the model, or the whole step."""

from drivetrain.compile.base import Compile, CudaGraph, Inductor, Jit, Regional, StepGraph, op_by_op

__all__ = ["Compile", "CudaGraph", "Inductor", "Jit", "Regional", "StepGraph", "op_by_op"]
