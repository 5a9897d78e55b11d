"""Operations drawn for each sample: RandAugment, TrivialAugment, and the three of DeiT III."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar

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


class RandomOperations(Augment):
    """Base class for drawing an operation per sample. Samples with the same operation are processed together."""

    effect = "changes"
    changes = "training images, by random operations"
    draws_on_cpu = True
    name: ClassVar[str]
    operations: ClassVar[Mapping[str, Operation | None]]
    fill = 0  # value of pixels outside of the image

    def draws(self, seed: int, epoch: int, indices: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each operation in turn its numbers and levels (n,), on the CPU."""
        raise self.unwritten("draws")

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from require_still_targets(run, self.name)

    def validate_shape(self, run: RunSpec, shape: Sequence[int]) -> Iterator[str]:
        yield from require_images(run, shape, self.name, rgb=True)

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        out = x.mul(255).round_().to(torch.uint8) if x.is_floating_point() else x
        for chosen, level in self.draws(seed, epoch, indices):
            order = chosen.argsort(stable=True)  # the samples of one operation become a view; one copy there and back
            levels = send(level[order], x.device)
            counts = chosen.bincount(minlength=len(self.operations)).tolist()
            out = out.index_select(0, send(order, x.device))
            parts = zip(self.operations.values(), out.split(counts), levels.split(counts), strict=True)
            out = torch.cat([self._operate(*part) for part in parts])
            out = out.index_select(0, send(order.argsort(), x.device))
        return out.to(x.dtype).div_(255) if x.is_floating_point() else out

    def _operate(self, operation: Operation | None, x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        if operation is None or not len(x):
            return x
        return in_chunks(lambda part, by: operation(part, by, self.fill), x, levels)

    def drawn(self, seed: int, epoch: int, indices: torch.Tensor, stream: int, choices: int) -> torch.Tensor:
        """Whole numbers below `choices`, one for each sample (n,)."""
        return (rng.uniform(seed, epoch, indices, stream) * choices).long()


def _affine(entries: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor | float, ...]]) -> Operation:
    """Map images by an affine matrix. `entries` computes its six entries, row by row, from the images and their levels (n,)."""

    def operation(x: torch.Tensor, level: torch.Tensor, fill: int) -> torch.Tensor:
        # torch.tensor(a number) on a device copies the number and waits; torch.full_like does neither.
        columns = [
            e.float() if isinstance(e, torch.Tensor) else torch.full_like(level, e, dtype=torch.float32)
            for e in entries(x, level)
        ]
        return warp(x, torch.stack(columns, 1).view(-1, 2, 3), fill)

    return operation


def table(shear: float, turn: float, factor: float, bits: int, shift: Callable[[int], float]) -> dict[str, Operation | None]:
    """Return the operations by name, each for levels −1 … 1.

    At level 1 a shear is `shear`, a rotation `turn` degrees, a colour's factor 1 + `factor`; `bits` are dropped, and an image
    of this size moves by `shift(size)` pixels.
    """

    def rotated(x: torch.Tensor, level: torch.Tensor) -> tuple[torch.Tensor | float, ...]:
        angle = torch.deg2rad(turn * level)
        return angle.cos(), -angle.sin(), 0.0, angle.sin(), angle.cos(), 0.0

    def blended(operation: Callable[..., torch.Tensor]) -> Operation:
        on_bytes = color.on_bytes(operation)
        return lambda x, level, fill: on_bytes(x, 1 + factor * level)

    return {
        "identity": None,
        # shears are about the top left corner
        "shear_x": _affine(lambda x, level: (1.0, shear * level, shear * level * (x.shape[2] / 2), 0.0, 1.0, 0.0)),
        "shear_y": _affine(lambda x, level: (1.0, 0.0, 0.0, shear * level, 1.0, shear * level * (x.shape[3] / 2))),
        "translate_x": _affine(lambda x, level: (1.0, 0.0, -(level * shift(x.shape[3])).trunc(), 0.0, 1.0, 0.0)),
        "translate_y": _affine(lambda x, level: (1.0, 0.0, 0.0, 0.0, 1.0, -(level * shift(x.shape[2])).trunc())),
        "rotate": _affine(rotated),
        "brightness": blended(color.brightness),
        "color": blended(color.saturation),
        "contrast": blended(color.contrast),
        "sharpness": blended(color.sharpness),
        "posterize": lambda x, level, fill: color.posterize(x, 8 - (bits * level.abs()).round()),
        "solarize": lambda x, level, fill: color.solarize(x, 255 * (1 - level.abs())),
        "autocontrast": lambda x, level, fill: color.autocontrast(x, level),
        "equalize": lambda x, level, fill: color.equalize(x, level),
    }


OPERATIONS = table(0.3, 30, 0.9, 4, lambda size: 150 / 331 * size)
WIDE = table(0.99, 135, 0.99, 6, lambda size: 32)
BINS = 31  # levels of the wide operations


class RandAugment(RandomOperations):
    """Applies `n` random operations of 14 to each sample, one after the other, all at one magnitude (Cubuk et al. 2020).

    Operations and strengths are those of torchvision's RandAugment.
    """

    name, operations = "randaugment", OPERATIONS

    def __init__(self, n: Operations = 2, magnitude: Magnitude = 9.0, fill: Byte = 128) -> None:
        self.n, self.magnitude, self.fill = n, magnitude, fill

    def draws(self, seed: int, epoch: int, indices: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for slot in range(self.n):
            minus = rng.uniform(seed, epoch, indices, base.SIGN[slot]) < 0.5
            level = torch.where(minus, -self.magnitude / 30, self.magnitude / 30)
            yield self.drawn(seed, epoch, indices, base.OPERATION[slot], len(OPERATIONS)), level


class TrivialAugment(RandomOperations):
    """Applies one random operation of 14 at a random strength to each sample (Müller and Hutter 2021).

    Operations and strengths are those of torchvision's TrivialAugmentWide.
    """

    name, operations = "trivialaugment", WIDE

    def __init__(self, fill: Byte = 0) -> None:
        self.fill = fill

    def draws(self, seed: int, epoch: int, indices: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        chosen, strength, sign = base.TRIVIAL
        level = self.drawn(seed, epoch, indices, strength, BINS) / (BINS - 1)
        minus = rng.uniform(seed, epoch, indices, sign) < 0.5
        yield self.drawn(seed, epoch, indices, chosen, len(WIDE)), torch.where(minus, -level, level)


class ThreeAugment(RandomOperations):
    """Makes each sample grey, inverts its bright values, or blurs it, with equal probability (Touvron et al. 2022, DeiT III).

    Strengths are the authors' and timm's (policy 3a): values from 128 on are bright, and the blur's deviation is between 0.1 and
    2 pixels. The paper's flips, crops and colour jitter are separate options.
    """

    name = "three_augment"
    operations: ClassVar[Mapping[str, Operation | None]] = {
        "gray": lambda x, level, fill: color.gray(x.float()).to(torch.uint8).expand_as(x),
        "solarize": lambda x, level, fill: color.solarize(x, torch.full_like(level, 128)),
        "blur": lambda x, level, fill: color.blur(x, level),
    }

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from ()  # no pixel moves

    def draws(self, seed: int, epoch: int, indices: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        chosen, deviation = base.THREE
        level = 0.1 + 1.9 * rng.uniform(seed, epoch, indices, deviation)
        yield self.drawn(seed, epoch, indices, chosen, len(self.operations)), level
