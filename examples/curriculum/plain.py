"""The same training as a loop of its own: what the run on easy.py is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from easy import Digits
from torch.utils.data import DataLoader


class Sampler(torch.utils.data.Sampler[int]):
    """Takes the samples of each epoch in the order that the data gives."""

    def __init__(self, data: Digits, seed: int = 0) -> None:
        self.data, self.seed, self.epoch = data, seed, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.data.order(self.seed, self.epoch - 1).tolist())


def train(model: torch.nn.Module, epochs: int, batch: int = 64, lr: float = 0.1) -> Iterator[float]:
    """Train; yield the loss of each update."""
    data = Digits()
    loader = DataLoader(data, batch, sampler=Sampler(data), drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(epochs):
        for images, digits in loader:
            value = torch.nn.functional.cross_entropy(model(images), digits)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield value.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(torch.nn.Linear(64, 10), epochs=20):
        print(f"loss {found:.4f}")
