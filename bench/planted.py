"""A model with a planted cost."""

from __future__ import annotations

import time

import torch


class Knobs(torch.nn.Module):
    """A small net with 15 knobs that do nothing, but for `extra_ms` that each forward sleeps when all of the `slow` ones are on.

    With `noisy` the guilty knobs make the result worse instead: that share of the outputs is replaced by noise.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, slow: list[int], extra_ms: float = 0.0, noisy: float = 0.0, **knobs: int
    ) -> None:  # fmt: skip
        super().__init__()
        guilty = all(knobs[f"k{number:02d}"] for number in slow)
        self.extra, self.noisy = (extra_ms / 1e3, noisy) if guilty else (0.0, 0.0)
        layers = torch.nn.Flatten(), torch.nn.LazyLinear(64), torch.nn.ReLU(), torch.nn.Linear(64, classes)
        self.body = torch.nn.Sequential(*layers)
        self.body(torch.zeros(1, *shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, channels, height, width) → (n, classes)."""
        out = self.body(x)
        if self.extra:
            time.sleep(self.extra)
        if self.noisy:
            out = torch.where(torch.rand(len(out), 1) < self.noisy, torch.randn_like(out), out)
        return out
