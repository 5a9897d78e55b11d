"""DINO on handwritten digits (Caron et al. 2021): a student learns to say what a teacher, its own average, says of another view.

What a run needs beside the networks: a teacher that follows after each update, a loss that keeps a centre, and a weight decay
that rises (`optimizer.final_weight_decay`).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from sklearn.datasets import load_digits
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


class Dino(nn.Module):
    """A student, and a teacher that is the average of its weights."""

    def __init__(self, width: int = 128, outputs: int = 64) -> None:
        super().__init__()
        self.student = nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, outputs)
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.student(images)

    def after_update(self, progress: Any) -> None:
        """Let the teacher follow, by a share that falls from a tenth to nothing."""
        share = 0.1 * (1 + math.cos(math.pi * progress.update / progress.updates)) / 2
        for mean, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(weight, share)


def view(images: torch.Tensor) -> torch.Tensor:
    """Draw a view of each image: some pixels are gone, the others are noisy."""
    return (images + 0.2 * torch.randn_like(images)) * (torch.rand_like(images) > 0.3)


class Loss(nn.Module):
    """The student's cross entropy with the teacher's answer to the other view, sharpened around the centre of its answers."""

    centre: torch.Tensor

    def __init__(self, outputs: int = 64) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(outputs))

    def forward(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = view(x), view(x)
        with torch.no_grad():
            answers = model.teacher(torch.cat([second, first]))
            wanted = ((answers - self.centre) / 0.04).softmax(1)
            if self.training:  # not in evaluations
                self.centre.lerp_(answers.mean(0), 0.1)
        said = (model(torch.cat([first, second])) / 0.1).log_softmax(1)
        return -(wanted * said).sum(1).mean()
