"""The same training as a loop of its own: what boxes.py is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from boxes import Detector, Pictures, found, loss
from torch.utils.data import DataLoader


def train(model: Detector, epochs: int, batch: int = 16, lr: float = 1e-3) -> Iterator[float]:
    """Train; yield the loss of each update and, after each epoch, the share of test pictures in which all is found."""
    loader = DataLoader(Pictures(), batch, drop_last=True)
    test = DataLoader(Pictures(train=False), batch)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(epochs):
        for sample in loader:
            value = torch.stack(list(loss(model, sample["image"], sample["target"]).values())).sum()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield value.item()
        with torch.no_grad():
            shares = [found(model(s["image"]), s["target"]) * len(s["image"]) for s in test]
        yield sum(shares) / len(test.dataset)


if __name__ == "__main__":
    torch.manual_seed(0)
    for value in train(Detector(2), epochs=25):
        print(f"{value:.4f}")
