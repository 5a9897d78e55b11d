"""A layer with cosines as outputs."""

from __future__ import annotations

from typing import Self

import torch
from torch.nn.functional import linear, normalize

from drivetrain.core.step.modules import taken_over
from drivetrain.loss.base import wide


class CosineLinear(torch.nn.Linear):
    """y = scale × the cosines between x and the rows of the weight, at least in float32.

    16 bits are too coarse for logits up to 64.
    """

    cosine_scale: torch.Tensor  # a buffer, so that its saved weights do not fit a plain layer

    @classmethod
    def of(cls, layer: torch.nn.Linear, scale: float) -> Self:
        """Return a layer with the weight of a linear one, and no bias."""
        made = taken_over(layer, cls)
        made.register_parameter("bias", None)
        made.register_buffer("cosine_scale", torch.tensor(scale, device=layer.weight.device))
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return linear(normalize(wide(x), dim=-1), normalize(wide(self.weight), dim=-1)) * self.cosine_scale
