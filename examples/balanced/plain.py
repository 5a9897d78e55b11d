"""The same training as a loop of its own: what the run on rare.py is measured against. Its sampler draws by the run's numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rare import Digits
from torch.utils.data import DataLoader

from drivetrain.core.order import balanced, index_of


class Sampler(torch.utils.data.Sampler[int]):
    """Draws each class as often as the others, in an order of its own for each epoch."""

    def __init__(self, targets: torch.Tensor, seed: int = 0) -> None:
        self.draw, self.seed, self.epoch = balanced(targets), seed, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(index_of(self.draw(self.seed, self.epoch - 1)).tolist())


def train(model: torch.nn.Module, epochs: int, batch: int = 64, lr: float = 0.1) -> Iterator[float]:
    """Train; yield the loss of each update."""
    data = Digits()
    loader = DataLoader(data, batch, sampler=Sampler(data.targets), drop_last=True)
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
