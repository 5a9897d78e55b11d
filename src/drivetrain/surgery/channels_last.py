"""surgery=[channels_last]: weights and images in NHWC order."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.core.trees import Tree
from drivetrain.surgery.base import Edit


class ChannelsLast(Edit):
    """Put weights and images in NHWC order, which convolution kernels read faster; transformers gain nothing."""

    effect = "close"
    changes = "kernels for another layout round otherwise"
    memory_format = "channels_last"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        shape = run.data.shape()
        if shape is not None and len(shape) != 3:
            yield f"surgery=[channels_last] wants images, but the data gives {list(shape)}: leave it out"

    def apply(self, model: torch.nn.Module, example: Tree) -> str:
        model.to(memory_format=torch.channels_last)
        return f"{sum(p.ndim == 4 for p in model.parameters())} weights in channels-last order"
