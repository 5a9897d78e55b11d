"""A model with a planted cost: each forward takes so many milliseconds more."""

from __future__ import annotations

import time

import torch


class Slowed(torch.nn.Module):
    """A small convolutional net; `extra_ms` are spun away in each forward."""

    def __init__(self, shape: tuple[int, ...], classes: int, extra_ms: float = 0.0) -> None:
        super().__init__()
        self.extra = extra_ms / 1e3
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(shape[0], 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, channels, height, width) → (n, classes)."""
        out = self.body(x)
        if self.extra:
            until = time.perf_counter() + self.extra
            while time.perf_counter() < until:
                pass
        return out
