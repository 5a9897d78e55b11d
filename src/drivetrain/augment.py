"""Augmentation: functions of a whole batch, on any device, whose randomness belongs to the sample and the epoch."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain import rng
from drivetrain.lazy import torch
from drivetrain.spec import CountOrZero, Part, Run, Share


class Augment(Part):
    """augment=none: samples as they are."""

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        """The batch (n, c, h, w) augmented; sample i draws from (seed, epoch, indices[i]) alone."""
        return x


class FlipCrop(Augment):
    """Random horizontal flips and shifts: crops of the image padded by its own mirror."""

    def __init__(self, flip: Share = 0.5, pad: CountOrZero = 4) -> None:
        self.flip, self.pad = flip, pad

    def check(self, run: Run) -> Iterator[str]:
        if not self.flip and not self.pad:
            yield "augment=flip_crop with flip=0 and pad=0 does nothing: set one of them or augment=none"

    def advise(self, run: Run) -> Iterator[str]:
        if run.choices["data"] == "digits" and self.flip:
            yield (
                "augment=flip_crop mirrors digits, which changes what they say: "
                "augment.flip_crop.flip=0 augment.flip_crop.pad=1 suits 8×8 digits"
            )

    def verify(self, run: Run) -> Iterator[str]:
        shape = run.data.shape()
        if shape is not None and (len(shape) != 3 or self.pad >= min(shape[1:])):
            yield f"augment.flip_crop.pad={self.pad} needs images larger than that, not {list(shape)}: lower it"

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        if self.flip:
            x = batch_flip(x, rng.uniform(seed, epoch, indices, 10) < self.flip)
        if self.pad:
            span = 2 * self.pad + 1
            dy = (rng.uniform(seed, epoch, indices, 11) * span).long()
            dx = (rng.uniform(seed, epoch, indices, 12) * span).long()
            x = batch_crop(x, dy, dx, self.pad)
        return x


def batch_flip(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Mirror the images (n, c, h, w) where `which` (n,) is true."""
    return torch.where(which.view(-1, 1, 1, 1), x.flip(-1), x)


def batch_crop(x: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, pad: int) -> torch.Tensor:
    """Crop images (n, c, h, w), padded by reflection, to their size at offsets dy, dx (n,) in 0 … 2·pad."""
    n, c, h, w = x.shape
    rows = _reflect(torch.arange(h, device=x.device) - pad + dy.view(-1, 1), h)  # (n, h)
    cols = _reflect(torch.arange(w, device=x.device) - pad + dx.view(-1, 1), w)  # (n, w)
    flat = rows.view(n, h, 1) * w + cols.view(n, 1, w)  # each output pixel's place in its image
    return x.flatten(2).gather(2, flat.view(n, 1, h * w).expand(n, c, h * w)).view(n, c, h, w)


def _reflect(index: torch.Tensor, size: int) -> torch.Tensor:
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)
