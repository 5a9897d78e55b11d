"""MAML (Finn et al. 2017): weights from which one step on five points fits a new sine wave.

What a run needs beside the network: samples that are whole tasks, and a loss that calls the model with weights of its making.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad

RATE = 0.1  # of the step that adapts to a task


class Waves(torch.utils.data.Dataset):
    """Tasks: points (10, 2) of a wave of its own height and phase, x and y. The first half is known, the others are asked."""

    def __init__(self, train: bool = True) -> None:
        draws, size = torch.Generator().manual_seed(int(train)), 192 if train else 48
        x = torch.rand(size, 10, generator=draws) * 10 - 5
        height, phase = torch.rand(2, size, 1, generator=draws) * torch.tensor([4.9, 3.1]).view(2, 1, 1)
        self.points = torch.stack([x, (height + 0.1) * torch.sin(x + phase)], 2)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.points[index], 0


class Net(nn.Module):
    """From x to y."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def loss(model: Any, input: torch.Tensor) -> torch.Tensor:
    """The error on the second half of each task's points after a step on the first half, through which it is differentiated."""

    def error(weights: dict[str, torch.Tensor], points: torch.Tensor) -> torch.Tensor:
        return (functional_call(model, weights, (points[:, :1],)) - points[:, 1:]).square().mean()

    weights, errors = dict(model.named_parameters()), []
    for known, asked in zip(input[:, :5], input[:, 5:], strict=True):
        step = grad(error)(weights, known)
        errors.append(error({name: weight - RATE * step[name] for name, weight in weights.items()}, asked))
    return torch.stack(errors).mean()
