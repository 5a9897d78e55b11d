"""The same training as a loop of its own: what the run of recurrent.py is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from recurrent import PLACES, Reader, Text, loss
from torch.utils.data import DataLoader


def train(model: Reader, epochs: int, lr: float = 0.01) -> Iterator[float]:
    """Train; yield the loss of each update."""
    loader = DataLoader(Text(), PLACES)
    optimizer = torch.optim.Adam(model.parameters(), lr, fused=True)
    for _ in range(epochs):
        for batch in loader:
            value = loss(model(batch["letters"], batch["begins"]), batch["label"])
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield value.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(Reader(), epochs=2):
        print(f"loss {found:.4f}")
