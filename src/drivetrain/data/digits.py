"""scikit-learn's digits: each alone, or several in one image."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from drivetrain.core.lazy import numpy as np
from drivetrain.core.lazy import torch
from drivetrain.core.machine.guards import too_large
from drivetrain.core.options.option import Count, RunSpec, Share
from drivetrain.core.step import rng
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.data.base import (
    Fraction,
    HeldOut,
    Normalize,
    Splits,
    Tensors,
    count_held_out,
    measure_normalization,
    number_apart,
)
from drivetrain.data.tabular import data_file

DIGITS = 1797
SIDE = 8  # pixels
Size = Annotated[int, Ge(4), Le(64)]
Digit = Annotated[int, Ge(0), Le(9)]


@dataclass(kw_only=True, eq=False)
class Digits(HeldOut[Tensors, None, Tensors]):
    """scikit-learn's 1,797 real handwritten digits, 8×8 (Alpaydin & Kaynak 1998). Nothing is downloaded.

    With `classes` only these digits, numbered from 0 in the order given: for pretraining on some and fine-tuning on others.
    Another `size` than 8 interpolates the images bilinearly.
    """

    max_value = 16.0
    mirrored_changes_label = True

    holdout: Fraction = 0.2
    validation: Fraction | None = 0.2
    normalize: bool = True
    classes: Sequence[Digit] | None = None
    size: Size = SIDE

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.classes is not None and len(set(self.classes)) < max(2, len(self.classes)):
            yield f"data.classes={list(self.classes)}: give two or more different digits, or null for all ten"

    def shape(self) -> tuple[int, ...]:
        return (1, self.size, self.size)

    def loaded_samples(self) -> int | None:
        return None if self.classes is not None else DIGITS - number_apart(DIGITS, self.holdout)

    def load(self, device: torch.device) -> Splits:
        x, y = read_digits()
        if self.size != SIDE:
            x = torch.nn.functional.interpolate(x.float(), size=(self.size, self.size), mode="bilinear", antialias=True)
            x = x.round().to(torch.uint8)
        order = rng.permutation(0, 0, len(y))  # the same split in every run, whatever its seed
        apart = number_apart(len(y), self.holdout)
        test, train = order[:apart], order[apart:]
        chosen = range(10) if self.classes is None else self.classes
        number = torch.tensor([chosen.index(digit) if digit in chosen else -1 for digit in range(10)])[y]
        train, test = (rows[number[rows] >= 0] for rows in (train, test))
        normalize = measure_normalization(x[train]) if self.normalize else Normalize([0.0], [1.0])
        names = None if self.classes is None else [str(digit) for digit in chosen]
        return Splits(
            train=Tensors(x[train], number[train]), test=Tensors(x[test], number[test]), shape=self.shape(),
            classes=len(chosen), normalize=normalize, names=names,
        )  # fmt: skip


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (n, 1, 8, 8) uint8 in 0 … 16 and labels (n,)."""
    table = read_table()
    x = torch.from_numpy(table[:, :-1]).to(torch.uint8).view(-1, 1, 8, 8)
    return x, torch.from_numpy(table[:, -1]).long()


@lru_cache(maxsize=1)  # parsing takes 20 ms, the result half a megabyte
def read_table() -> np.ndarray:
    """Return the file: a row (65,) for each digit: its pixels and its label."""
    return np.loadtxt(data_file("digits.csv.gz"), delimiter=",", dtype=np.float32)


DIGIT, CELL, ACROSS = 8, 12, 2  # pixels of a digit, pixels of a cell, cells along a side
INK = 4  # a pixel of a digit belongs to it from this value on, of 16
STREAM = 7  # of the random numbers that place the digits


@dataclass(kw_only=True, eq=False)
class DigitScenes(HeldOut[Tensors, None, Tensors]):
    """Real digits (scikit-learn's) at random places on a canvas of noise, 24×24. Nothing is downloaded.

    The canvas has 2×2 cells, and each holds a digit with the probability `density`, somewhere within its 12×12 pixels. Targets
    are the labels of the digits that are there, or a mask: 0 for the background, digit + 1 for its pixels. Digits of the test and
    validation scenes are in no other set. These scenes are the same in every run.
    """

    max_value = 16.0
    mirrored_changes_label = True
    reads: ClassVar[tuple[TargetKind, ...]] = ("labels", "mask")

    kind: Literal["labels", "mask"] | None = None
    validation: Fraction | None = 0.1
    samples: Count = 2000
    test_samples: Count = 500
    density: Share = 0.6
    noise: Annotated[int, Ge(0), Le(16)] = 6
    holdout: Fraction = 0.2
    normalize: bool = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        scenes = self.samples + self.test_samples
        yield from too_large(f"{scenes:,} scenes", scenes * math.prod(self.shape()), "data.samples or data.test_samples")

    def shape(self) -> tuple[int, ...]:
        return (1, ACROSS * CELL, ACROSS * CELL)

    def loaded_samples(self) -> int:
        return self.samples

    def load(self, device: torch.device) -> Splits:
        digits, classes = read_digits()
        apart = number_apart(len(classes), self.holdout)
        test, rest = torch.split(rng.permutation(0, 0, len(classes)), [apart, len(classes) - apart])
        share = self.share()
        held, samples = (0, 0) if share is None else (count_held_out(n, share) for n in (len(rest), self.samples))
        parts = [(rest[held:], self.samples - samples), (test, self.test_samples), (rest[:held], samples)]
        sources = [
            Tensors(*self._scenes(digits[chosen], classes[chosen], scenes, split))
            for split, (chosen, scenes) in enumerate(parts)
            if scenes
        ]
        names = [str(digit) for digit in range(10)]
        if self.targets == "mask":
            names = ["background", *names]
        normalize = measure_normalization(sources[0].x) if self.normalize else None
        validation = sources[2] if samples else None
        return Splits(
            train=sources[0], test=sources[1], shape=self.shape(), classes=len(names), normalize=normalize, names=names,
            validation=validation,
        )  # fmt: skip

    def _scenes(self, digits: torch.Tensor, classes: torch.Tensor, count: int, split: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count` images (n, 1, 24, 24) uint8 and their labels (n, 10) or masks (n, 24, 24)."""
        generator = torch.Generator().manual_seed(rng.mix(split, STREAM))
        side = ACROSS * CELL
        images = torch.randint(self.noise + 1, (count, side, side), generator=generator, dtype=torch.uint8)
        masks, labels = torch.zeros(count, side, side, dtype=torch.int64), torch.zeros(count, 10)
        pixels = torch.arange(DIGIT)
        for row in range(ACROSS):
            for column in range(ACROSS):
                chosen = torch.randint(len(digits), (count,), generator=generator)
                there = torch.rand(count, generator=generator) < self.density
                top, left = torch.randint(CELL - DIGIT + 1, (2, count), generator=generator)
                at = (
                    torch.arange(count).view(-1, 1, 1),
                    (row * CELL + top.view(-1, 1) + pixels).unsqueeze(2),
                    (column * CELL + left.view(-1, 1) + pixels).unsqueeze(1),
                )
                drawn, here = digits[chosen, 0], there.view(-1, 1, 1)
                images[at] = torch.where(here, torch.maximum(images[at], drawn), images[at])
                masks[at] = torch.where(here & (drawn >= INK), classes[chosen].view(-1, 1, 1) + 1, masks[at])
                labels[there, classes[chosen][there]] = 1.0
        return images.unsqueeze(1), masks if self.targets == "mask" else labels
