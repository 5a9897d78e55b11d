"""A small residual network for small images, after David Page's ResNet-9 (DAWNBench 2018)."""

from __future__ import annotations

import torch
from torch import nn


class ConvNorm(nn.Sequential):
    """3×3 convolution, BatchNorm, ReLU."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvNorm(width, width, bias), ConvNorm(width, width, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class ResNet9(nn.Module):
    """Images (n, c, h, w) of at least 8×8 to logits (n, classes)."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int, bias: bool) -> None:
        super().__init__()
        pool = nn.MaxPool2d(2)
        self.features = nn.Sequential(
            ConvNorm(shape[0], width, bias),
            ConvNorm(width, 2 * width, bias), pool, Residual(2 * width, bias),
            ConvNorm(2 * width, 4 * width, bias), pool,
            ConvNorm(4 * width, 8 * width, bias), pool, Residual(8 * width, bias),
        )  # fmt: skip
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).amax((2, 3)))
