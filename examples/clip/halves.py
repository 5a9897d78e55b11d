"""CLIP (Radford et al. 2021) of the upper and the lower halves of handwritten digits: which two belong together?

What a run needs beside the two encoders: samples that are dicts of two inputs, and a model that returns two embeddings.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn


class Halves(torch.utils.data.Dataset):
    """1,797 digits as two inputs (32,); every eighth one is for the test."""

    def __init__(self, train: bool = True) -> None:
        pixels = torch.from_numpy(load_digits(return_X_y=True)[0]).float() / 16
        self.pixels = pixels[(torch.arange(len(pixels)) % 8 != 0) == train]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:
        upper, lower = self.pixels[index].split(32)
        return {"upper": upper, "lower": lower}, 0


class Both(nn.Module):
    """An encoder for each half."""

    def __init__(self, width: int = 128, size: int = 32) -> None:
        super().__init__()
        self.upper, self.lower = (nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, size)) for _ in range(2))

    def forward(self, upper: torch.Tensor, lower: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.upper(upper), self.lower(lower)
