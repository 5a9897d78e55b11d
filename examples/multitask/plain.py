"""The same training as a loop of its own: what tasks.py is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tasks import Digits, Net, figures, loss
from torch.utils.data import DataLoader


def train(model: Net, epochs: int, batch: int = 64, lr: float = 1e-2) -> Iterator[dict[str, float]]:
    """Train; yield the losses of each update and, after each epoch, the figures of the test set."""
    loader = DataLoader(Digits(), batch, drop_last=True)
    test = DataLoader(Digits(train=False), batch)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(epochs):
        for sample in loader:
            found = loss(model(sample["image"]), sample, model)
            found["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            yield {name: value.item() for name, value in found.items()}
        with torch.no_grad():
            totals = {"right": 0.0, "off": 0.0}
            for sample in test:
                for name, value in figures(model(sample["image"]), sample).items():
                    totals[name] += float(value) * len(sample["image"])
            yield {name: total / len(test.dataset) for name, total in totals.items()}


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(Net(10), epochs=20):
        print("  ".join(f"{name} {value:.4f}" for name, value in found.items()))
