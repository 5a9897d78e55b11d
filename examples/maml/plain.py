"""The same training as a loop of its own: what waves.py is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader
from waves import RATE, Net, Waves


def train(model: Net, epochs: int, batch: int = 16, lr: float = 1e-3) -> Iterator[float]:
    """Train; yield the loss of each update. The step that adapts is taken by autograd, layer by layer."""
    loader, optimizer = DataLoader(Waves(), batch, drop_last=True), torch.optim.Adam(model.parameters(), lr)

    def output(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for n in range(0, len(weights) - 2, 2):
            x = torch.tanh(x @ weights[n].T + weights[n + 1])
        return x @ weights[-2].T + weights[-1]

    for _ in range(epochs):
        for tasks, _ in loader:
            total, weights = torch.zeros(()), list(model.parameters())
            for (x, y), (x_asked, y_asked) in ((half.T.unsqueeze(2) for half in task.split(5)) for task in tasks):
                step = torch.autograd.grad((output(weights, x) - y).square().mean(), weights, create_graph=True)
                adapted = [weight - RATE * gradient for weight, gradient in zip(weights, step, strict=True)]
                total = total + (output(adapted, x_asked) - y_asked).square().mean()
            loss = total / len(tasks)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(Net(), epochs=100):
        print(f"loss {found:.4f}")
