"""precision=fp64"""

from __future__ import annotations

from drivetrain.core.lazy import torch
from drivetrain.core.step.trees import cast
from drivetrain.precision import Precision


class Fp64(Precision):
    """Weights, activations and gradients in float64."""

    effect = "close"
    changes = "rounds to 53 bits in the place of 24"
    full_float32 = False  # a capability: rules ask for it that need every tensor in float32

    def convert(self, model: torch.nn.Module, example: torch.Tensor) -> torch.nn.Module:
        model.register_forward_pre_hook(lambda _, inputs: cast(inputs, torch.float64))
        return model.double()
