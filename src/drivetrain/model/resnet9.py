"""A small residual network for small images, after David Page's ResNet-9 (DAWNBench 2018)."""

from __future__ import annotations

import torch
from torch import nn


def conv_norm(inputs: int, outputs: int, bias: bool) -> nn.Sequential:
    """3×3 convolution, BatchNorm, ReLU. A Sequential, not a class, so that the network's repeated blocks are its Residuals."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """x + two convolutions of x."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_norm(width, width, bias), conv_norm(width, width, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class ResNet9(nn.Module):
    """Images (n, c, h, w) of at least 8×8 to logits (n, classes)."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int, bias: bool) -> None:
        super().__init__()
        pool = nn.MaxPool2d(2)
        self.features = nn.Sequential(
            conv_norm(shape[0], width, bias),
            conv_norm(width, 2 * width, bias), pool, Residual(2 * width, bias),
            conv_norm(2 * width, 4 * width, bias), pool,
            conv_norm(4 * width, 8 * width, bias), pool, Residual(8 * width, bias),
        )  # fmt: skip
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # max, not amax: the backward of amax compares its output with x, and a compiler may recompute x in bfloat16 with
        # another rounding, in which no element is equal.
        return self.head(self.features(x).flatten(2).max(2).values)
