"""The same training as a loop of its own: what dpo.py is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from dpo import Preferring, Sums, loss
from torch.utils.data import DataLoader


def train(model: Preferring, epochs: int, batch: int = 16) -> Iterator[float]:
    """Train; yield the loss of each update."""
    loader = DataLoader(Sums(), batch, generator=torch.Generator())  # which draws from no other stream
    optimizer = torch.optim.AdamW(model.policy.parameters(), lr=1e-3, weight_decay=0.0)
    model.policy.train()
    for _ in range(epochs):
        for tokens, targets in loader:
            value = loss(model, tokens, targets)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield value.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(Preferring(), epochs=20):
        print(f"loss {found:.4f}")
