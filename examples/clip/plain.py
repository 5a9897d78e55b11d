"""The same training as a loop of its own: what halves.py is measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from halves import Both, Halves
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader


def train(model: Both, epochs: int, batch: int = 128, lr: float = 1e-3) -> Iterator[float]:
    """Train; yield the loss of each update."""
    scale = getattr(model, "logit_scale", None)
    if scale is None:
        scale = model.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())
    loader = DataLoader(Halves(), batch, drop_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(epochs):
        for x, _ in loader:
            upper, lower = (normalize(embedding, dim=1) for embedding in model(**x))
            scores = scale.exp() * upper @ lower.T
            right = torch.arange(len(scores))
            loss = (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                scale.clamp_(0, torch.tensor(100.0).log())
            yield loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    for found in train(Both(), epochs=50):
        print(f"loss {found:.4f}")
