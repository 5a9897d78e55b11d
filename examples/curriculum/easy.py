"""Handwritten digits, the plain ones first: `data.order=own` takes the samples as the Dataset's `order` says."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

RISES = 4  # epochs until all digits take part


class Digits(torch.utils.data.Dataset):
    """Images (64,) from 0 to 1; every fifth one is for the test."""

    num_classes = 10

    def __init__(self, train: bool = True) -> None:
        images, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        kept = (torch.arange(len(digits)) % 5 != 0) == train
        self.images, self.targets = images[kept].float() / 16, digits[kept]
        means = torch.stack([self.images[self.targets == digit].mean(0) for digit in range(10)])
        self.by_difficulty = (self.images - means[self.targets]).square().sum(1).argsort()  # how unlike its class each one is

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.targets[index]

    def order(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the samples (n,) of an epoch: the easiest of them, in a random order, again and again until there are n."""
        easy = self.by_difficulty[: len(self) * min(epoch + 1, RISES) // RISES]
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        shuffled = easy[torch.randperm(len(easy), generator=generator)]
        return shuffled.repeat(RISES + 1)[: len(self)]
