"""Two tasks with one network, whose losses are weighed by what the network learns of their noise (Kendall et al. 2018).

A sample has two targets, and an output of the network has two parts: both are dicts. The weights of the tasks are parameters of
the network, so that its optimizer trains them.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

Parts = dict[str, torch.Tensor]


class Digits(torch.utils.data.Dataset):
    """Handwritten digits: which one it is, and how much ink was used."""

    num_classes = 10

    def __init__(self, train: bool = True) -> None:
        pixels, digits = load_digits(return_X_y=True)
        chosen = (torch.arange(len(pixels)) % 8 != 0) == train
        self.images, self.digits = torch.from_numpy(pixels).float()[chosen] / 16, torch.from_numpy(digits)[chosen]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Parts:
        image = self.images[index]
        return {"image": image, "digit": self.digits[index], "ink": image.mean()}


class Net(nn.Module):
    """A body with a head for each task, and the logarithms of the tasks' noise."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.Tanh())
        self.digit, self.ink = nn.Linear(width, classes), nn.Linear(width, 1)
        self.log_variance = nn.Parameter(torch.zeros(2))

    def forward(self, image: torch.Tensor) -> Parts:
        hidden = self.body(image)
        return {"digit": self.digit(hidden), "ink": self.ink(hidden).squeeze(1)}


def loss(output: Parts, target: Parts, model: Any) -> Parts:
    """The sum of both losses, each divided by the variance of its task's noise, which costs something too."""
    digit = functional.cross_entropy(output["digit"], target["digit"])
    ink = functional.mse_loss(output["ink"], target["ink"])
    weighed = torch.stack([digit, ink]) * (-model.log_variance).exp() + model.log_variance / 2
    return {"loss": weighed.sum(), "digit": digit, "ink": ink}


def figures(output: Parts, target: Parts) -> Parts:
    """The share of right digits, and the mean error of the ink."""
    right = (output["digit"].argmax(1) == target["digit"]).float().mean()
    return {"right": right, "off": (output["ink"] - target["ink"]).abs().mean()}
