"""Compilation of the model, or of the whole step. Evaluation and saving always use the uncompiled model."""

from drivetrain.compile.base import Compile

__all__ = ["Compile"]
