"""A multilayer perceptron."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn


class Layer(nn.Module):
    """Linear, ReLU, dropout."""

    def __init__(self, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linear(x))
        return x if self.dropout is None else self.dropout(x)


class Mlp(nn.Module):
    """Inputs (n, …), flattened, to logits (n, classes)."""

    def __init__(self, shape: tuple[int, ...], classes: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        widths = [math.prod(shape), *hidden]
        self.layers = nn.Sequential(*(Layer(i, o, dropout) for i, o in itertools.pairwise(widths)))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x.flatten(1)))
