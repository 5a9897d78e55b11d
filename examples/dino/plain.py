"""The same training as a loop of its own: what dino.py is measured against."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from dino import Digits, Dino, Loss
from torch.utils.data import DataLoader


def cosine(start: float, end: float, share: float) -> float:
    """A value that goes from `start` to `end` by half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def train(model: Dino, epochs: int, batch: int = 128) -> Iterator[float]:
    """Train; yield the loss of each update."""
    loader = DataLoader(Digits(), batch, drop_last=True, generator=torch.Generator())  # which draws from no other stream
    weights = [p for p in model.student.parameters() if p.ndim > 1]
    biases = [p for p in model.student.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])
    loss, update, updates = Loss(), 0, epochs * len(loader)
    for _ in range(epochs):
        for images, _ in loader:
            for group in optimizer.param_groups:
                group["lr"] = cosine(1e-3, 0.0, update / updates)
            optimizer.param_groups[0]["weight_decay"] = cosine(0.04, 0.4, update / updates)
            value = loss(model, images)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            update += 1
            with torch.no_grad():
                share = cosine(0.1, 0.0, update / updates)
                for mean, weight in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                    mean.lerp_(weight, share)
            yield value.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(Dino(), epochs=100):
        print(f"loss {found:.4f}")
