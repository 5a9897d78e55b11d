"""The same training as a loop of its own: what hints.py is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hints import Digits, Taught, loss
from torch.utils.data import DataLoader


def train(model: Taught, epochs: int, batch: int = 64) -> Iterator[dict[str, float]]:
    """Train; yield the loss of each update and its parts."""
    loader = DataLoader(Digits(), batch, drop_last=True, generator=torch.Generator())  # which draws from no other stream
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(epochs):
        for images, labels in loader:
            parts = loss(model, images, labels)
            total = parts["task"] + parts["hint"]
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield {"loss": total.item(), **{name: value.item() for name, value in parts.items()}}


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(Taught(), epochs=20):
        print(" ".join(f"{name} {value:.4f}" for name, value in found.items()))
