"""RandAugment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import annotated_types

from drivetrain.augment import base, color
from drivetrain.augment.base import Augment, in_chunks, require_images, require_still_targets
from drivetrain.augment.geometry import warp
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import RunSpec
from drivetrain.core.step import rng
from drivetrain.core.step.tensors import send

Operations = Annotated[int, annotated_types.Ge(1), annotated_types.Le(len(base.OPERATION))]
Magnitude = Annotated[float, annotated_types.Ge(0), annotated_types.Le(30)]
Byte = Annotated[int, annotated_types.Ge(0), annotated_types.Le(255)]
Operation = Callable[["torch.Tensor", "torch.Tensor", int], "torch.Tensor"]  # uint8 images, levels −1 … 1 (n,), fill → images


class RandAugment(Augment):
    """Applies `n` random operations of 14 to each sample, one after the other, all of one magnitude (Cubuk et al. 2020).

    Operations and strengths are those of torchvision's RandAugment. Samples that drew the same operation are processed together.
    """

    effect = "changes"
    changes = "training images, by random operations"
    draws_on_cpu = True

    def __init__(self, n: Operations = 2, magnitude: Magnitude = 9.0, fill: Byte = 128) -> None:
        self.n, self.magnitude, self.fill = n, magnitude, fill

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from require_still_targets(run, "randaugment")

    def validate_shape(self, run: RunSpec, shape: Sequence[int]) -> Iterator[str]:
        yield from require_images(run, shape, "randaugment", rgb=True)

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        out = x.mul(255).round_().to(torch.uint8) if x.is_floating_point() else x
        for slot in range(self.n):
            chosen = (rng.uniform(seed, epoch, indices, base.OPERATION[slot]) * len(OPERATIONS)).long()
            minus = rng.uniform(seed, epoch, indices, base.SIGN[slot]) < 0.5
            level = torch.where(minus, -self.magnitude / 30, self.magnitude / 30)
            order = chosen.argsort(stable=True)  # groups of one operation are views; one copy there and back
            levels = send(level[order], x.device)
            counts = chosen.bincount(minlength=len(OPERATIONS)).tolist()
            out = out.index_select(0, send(order, x.device))
            parts = zip(OPERATIONS.values(), out.split(counts), levels.split(counts), strict=True)
            out = torch.cat([self._operate(*part) for part in parts])
            out = out.index_select(0, send(order.argsort(), x.device))
        return out.to(x.dtype).div_(255) if x.is_floating_point() else out

    def _operate(self, operation: Operation | None, x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        if operation is None or not len(x):
            return x
        return in_chunks(lambda part, by: operation(part, by, self.fill), x, levels)


def _affine(entries: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor | float, ...]]) -> Operation:
    """Map images by an affine matrix, whose six entries, row by row, `entries` makes of the images and their levels (n,)."""

    def operation(x: torch.Tensor, level: torch.Tensor, fill: int) -> torch.Tensor:
        # torch.tensor(a number) on a device copies the number and waits; torch.full_like does neither.
        columns = [
            e.float() if isinstance(e, torch.Tensor) else torch.full_like(level, e, dtype=torch.float32)
            for e in entries(x, level)
        ]
        return warp(x, torch.stack(columns, 1).view(-1, 2, 3), fill)

    return operation


def _rotated(x: torch.Tensor, level: torch.Tensor) -> tuple[torch.Tensor | float, ...]:
    angle = torch.deg2rad(30 * level)
    return angle.cos(), -angle.sin(), 0.0, angle.sin(), angle.cos(), 0.0


def _factor(operation: Callable[..., torch.Tensor]) -> Operation:
    on_bytes = color.on_bytes(operation)
    return lambda x, level, fill: on_bytes(x, 1 + 0.9 * level)


OPERATIONS: dict[str, Operation | None] = {
    "identity": None,
    # shears are about the top left corner
    "shear_x": _affine(lambda x, level: (1.0, 0.3 * level, 0.3 * level * (x.shape[2] / 2), 0.0, 1.0, 0.0)),
    "shear_y": _affine(lambda x, level: (1.0, 0.0, 0.0, 0.3 * level, 1.0, 0.3 * level * (x.shape[3] / 2))),
    "translate_x": _affine(lambda x, level: (1.0, 0.0, -(level * (150 / 331 * x.shape[3])).trunc(), 0.0, 1.0, 0.0)),
    "translate_y": _affine(lambda x, level: (1.0, 0.0, 0.0, 0.0, 1.0, -(level * (150 / 331 * x.shape[2])).trunc())),
    "rotate": _affine(_rotated),
    "brightness": _factor(color.brightness),
    "color": _factor(color.saturation),
    "contrast": _factor(color.contrast),
    "sharpness": _factor(color.sharpness),
    "posterize": lambda x, level, fill: color.posterize(x, 8 - (4 * level.abs()).round()),
    "solarize": lambda x, level, fill: color.solarize(x, 255 * (1 - level.abs())),
    "autocontrast": lambda x, level, fill: color.autocontrast(x, level),
    "equalize": lambda x, level, fill: color.equalize(x, level),
}
