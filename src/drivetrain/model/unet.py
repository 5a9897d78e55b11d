"""A small U-Net (Ronneberger et al. 2015): a class for each pixel."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import interpolate


class Block(nn.Sequential):
    """Two 3×3 convolutions, each with BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        def conv(channels: int) -> list[nn.Module]:
            return [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

        super().__init__(*conv(inputs), *conv(outputs))


class UNet(nn.Module):
    """Images (n, c, h, w) of at least 2^depth pixels a side to logits (n, classes, h, w).

    Each of `depth` levels halves the size and doubles the channels; on the way up a level also sees what it saw on the way
    down. It enlarges by repeating pixels, which needs no size to be a multiple of anything.
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
        return self.head(x)
