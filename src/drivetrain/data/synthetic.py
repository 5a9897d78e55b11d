"""Random inputs, to measure the speed of everything except the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import annotated_types

from drivetrain.core.lazy import torch
from drivetrain.core.machine.guards import too_large
from drivetrain.core.options.option import Count, CountOrZero, RunSpec
from drivetrain.core.order import Sampling
from drivetrain.core.step import rng
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.data.base import Data, Folds, Fraction, Splits, Tensors

Shape = Annotated[Sequence[Count], annotated_types.MinLen(1)]  # of one input, without the batch


class Synthetic(Data):
    """Random inputs, made on the device; with `tokens`, sequences of shape [length].

    A sequence's tokens are numbers below `classes`, and the target of each token is the next one.
    """

    max_value = None
    on_device = True

    def __init__(
        self,
        shape: Shape = (3, 32, 32),
        classes: Count = 10,
        samples: Count = 2048,
        test_samples: Count = 256,
        validation: Fraction | None = None,
        tokens: bool = False,
        drop_last: bool = True,
        order: Sampling = "shuffled",
        folds: Folds | None = None,
        fold: CountOrZero = 0,
    ) -> None:
        self.folds, self.fold = folds, fold
        self._shape, self.classes, self.drop_last, self.order = tuple(shape), classes, drop_last, order
        self.samples, self.test_samples, self.validation, self.tokens = samples, test_samples, validation, tokens
        self.targets: TargetKind = "tokens" if tokens else "class"
        self.__post_init__()

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.tokens and len(self._shape) != 1:
            yield f"data.tokens=true gives sequences, and data.shape={list(self._shape)} is none: set data.shape to [length]"

        count = self.samples + self.test_samples
        yield from too_large(
            f"{count:,} samples of the shape {list(self._shape)}", 4 * count * math.prod(self._shape), "data.samples"
        )

    def advise(self, run: RunSpec) -> Iterator[str]:
        return iter(())  # random inputs have no value to select by

    def shape(self) -> tuple[int, ...]:
        return self._shape

    def loaded_samples(self) -> int:
        return self.samples

    def load(self, device: torch.device) -> Splits:
        generator = torch.Generator(device).manual_seed(rng.mix(0, 5))

        def make(n: int) -> Tensors:
            if self.tokens:
                row = torch.randint(self.classes, (n, self._shape[0] + 1), generator=generator, device=device)
                return Tensors(row[:, :-1].contiguous(), row[:, 1:].contiguous())
            x = torch.randn(n, *self._shape, generator=generator, device=device)
            return Tensors(x, torch.randint(self.classes, (n,), generator=generator, device=device))

        dtype = torch.int64 if self.tokens else None
        return Splits(
            train=make(self.samples), test=make(self.test_samples), shape=self._shape, classes=self.classes, normalize=None,
            dtype=dtype,
        )  # fmt: skip
