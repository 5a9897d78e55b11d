"""Distillation of features (Romero et al. 2015, FitNets): a narrow student also learns what a hidden layer of a teacher says.

What a run needs beside the data: a teacher that rests, a layer that maps the student's features to the teacher's, and the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from torch import nn


class Digits(torch.utils.data.Dataset):
    """1,797 images (64,) from 0 to 1; every eighth one is for the test."""

    classes = tuple("0123456789")

    def __init__(self, train: bool = True) -> None:
        found = load_digits()
        chosen = (torch.arange(len(found.target)) % 8 != 0) == train
        self.images = torch.from_numpy(found.data).float()[chosen] / 16
        self.labels = torch.from_numpy(found.target)[chosen]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


def hidden_layer(width: int) -> nn.Sequential:
    """The hidden layer of a network that scikit-learn has trained on the digits; it trains no more."""
    digits = Digits()
    trained = MLPClassifier((width,), max_iter=40, random_state=0).fit(digits.images.numpy(), digits.labels.numpy())
    layer = nn.Linear(64, width)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(trained.coefs_[0]).T)
        layer.bias.copy_(torch.from_numpy(trained.intercepts_[0]))
    return nn.Sequential(layer, nn.ReLU()).eval().requires_grad_(False)


class Taught(nn.Module):
    """A student of a few features, and the teacher's layer that it learns from."""

    def __init__(self, width: int = 12, teachers: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, width), nn.ReLU())
        self.head, self.hint = nn.Linear(width, 10), nn.Linear(width, teachers)
        self.teacher = hidden_layer(teachers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Cross entropy, and how far the student's features are, mapped, from the teacher's."""
    features = model.features(x)
    return {
        "task": nn.functional.cross_entropy(model.head(features), y),
        "hint": nn.functional.mse_loss(model.hint(features), model.teacher(x)),
    }
