"""Shipped networks for vectors and images: a multilayer perceptron, a small ResNet, and a small U-Net."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import interpolate


class Layer(nn.Module):
    """Linear, ReLU, dropout."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linear(x))
        return x if self.dropout is None else self.dropout(x)


class Mlp(nn.Module):
    """Inputs (n, …), flattened, to logits (n, classes)."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        widths = [math.prod(shape), *hidden]
        self.layers = nn.Sequential(*(Layer(i, o, dropout) for i, o in itertools.pairwise(widths)))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(x.flatten(1)))
        return found


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
        found: torch.Tensor = x + self.body(x)
        return found


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
        # max, not amax: the backward of amax compares its output with x. A compiler may recompute x in bfloat16 with another
        # rounding, and then no element is equal.
        found: torch.Tensor = self.head(self.features(x).flatten(2).max(2).values)
        return found


class Block(nn.Sequential):
    """Two 3×3 convolutions, each with BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        def conv(channels: int) -> list[nn.Module]:
            return [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

        super().__init__(*conv(inputs), *conv(outputs))


class UNet(nn.Module):
    """Images (n, c, h, w) of at least 2^depth pixels a side to logits (n, classes, h, w).

    Each of `depth` levels halves the size and doubles the channels; on the way up a level also reads its own output of the way
    down. Upsampling repeats pixels, so that any size works.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(Block(i, o) for i, o in zip([shape[0], *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(Block(i + o, o) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            seen.append(x)
        seen.pop()
        for block in self.up:
            wide = seen.pop()
            x = block(torch.cat([interpolate(x, size=wide.shape[-2:]), wide], 1))
        found: torch.Tensor = self.head(x)
        return found
