"""The same training as a loop of its own: what wgan.py is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader
from wgan import Digits, Gan, loss


def train(model: Gan, epochs: int, batch: int = 64, every: int = 3) -> Iterator[dict[str, float]]:
    """Train; yield the losses of each update."""
    loader = DataLoader(Digits(), batch, drop_last=True, generator=torch.Generator())  # which draws from no other stream
    critics = torch.optim.Adam(model.critic.parameters(), 1e-3, (0.0, 0.9))
    generators = torch.optim.Adam(model.generator.parameters(), 5e-4, (0.0, 0.9))
    updates = 0
    for _ in range(epochs):
        for images, _ in loader:
            updates += 1
            critics.zero_grad()
            value = loss(model, images, "critic")["loss"]
            value.backward()
            critics.step()
            losses = {"critic": value.item()}
            if updates % every == 0:
                generators.zero_grad()
                value = loss(model, images, "generator")
                value.backward()
                generators.step()
                losses["generator"] = value.item()
            yield losses


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(Gan(), epochs=100):
        print(" ".join(f"{name} {value:.4f}" for name, value in found.items()))
