"""augment=[invert]"""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.augment import Augment
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Positive, RunSpec, Share
from drivetrain.core.step import rng

STREAM = 1000  # of random numbers, which no other augmentation uses; drivetrain's own are below 1000


class Invert(Augment):
    """Turn some images into their negatives."""

    effect = "changes"
    changes = "some images are shown as their negatives"

    def __init__(self, probability: Share = 0.5, max_value: Positive = 255.0) -> None:
        self.probability, self.max_value = probability, max_value

    def validate(self, run: RunSpec) -> Iterator[str]:
        largest = run.data.max_value  # None where it is not known
        if largest is not None and largest != self.max_value:
            yield (
                f"augment.invert.max_value={self.max_value:g}, but the pixels of {run.named('data')} go up to {largest:g}: "
                f"set augment.invert.max_value={largest:g}"
            )

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        """Images (n, c, h, w), uint8 or float. Each sample's draw depends on (seed, epoch, index) alone."""
        chosen = rng.uniform(seed, epoch, indices, STREAM) < self.probability
        return torch.where(chosen.view(-1, 1, 1, 1), (self.max_value - x).to(x.dtype), x)
