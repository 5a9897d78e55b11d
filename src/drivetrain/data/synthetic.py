"""Random inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import annotated_types

from drivetrain import rng
from drivetrain.data.base import Data, Splits, Tensors
from drivetrain.lazy import torch
from drivetrain.spec import Count

Shape = Annotated[Sequence[Count], annotated_types.MinLen(1)]  # of one input, without the batch


class Synthetic(Data):
    """Random inputs on the device: the speed of everything but the data."""

    peak = None

    def __init__(
        self,
        shape: Shape = (3, 32, 32),
        classes: Count = 10,
        samples: Count = 2048,
        test_samples: Count = 256,
        drop_last: bool = True,
    ) -> None:
        self._shape, self.classes, self.drop_last = tuple(shape), classes, drop_last
        self.samples, self.test_samples = samples, test_samples

    def shape(self) -> tuple[int, ...]:
        return self._shape

    def train_samples(self) -> int:
        return self.samples

    def load(self, device: torch.device) -> Splits:
        generator = torch.Generator(device).manual_seed(rng.mix(0, 5))

        def make(n: int) -> Tensors:
            x = torch.randn(n, *self._shape, generator=generator, device=device)
            return Tensors(x, torch.randint(self.classes, (n,), generator=generator, device=device))

        return Splits(make(self.samples), make(self.test_samples), self._shape, self.classes, None)
