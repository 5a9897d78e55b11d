"""The same training as a loop of its own: what denoise.py is measured against."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from denoise import Denoiser, Digits, loss, sample
from torch.utils.data import DataLoader


def train(
    model: Denoiser, epochs: int, batch: int = 128, lr: float = 1e-3, decay: float = 0.99
) -> Iterator[float | torch.Tensor]:
    """Train; yield the loss of each update and, after each epoch, images that the averaged weights draw."""
    loader = DataLoader(Digits(), batch, drop_last=True, generator=torch.Generator())  # which draws from no other stream
    optimizer = torch.optim.Adam(model.parameters(), lr)
    average = copy.deepcopy(model)
    for _ in range(epochs):
        for images, _ in loader:
            value = loss(model, images)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(weight, 1 - decay)
            yield value.item()
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            yield sample(average, 32)


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(Denoiser(), epochs=100):
        print(f"loss {found:.4f}" if isinstance(found, float) else f"drawn: from {found.min():.2f} to {found.max():.2f}")
