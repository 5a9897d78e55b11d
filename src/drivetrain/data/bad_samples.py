"""What happens to a sample that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge

from drivetrain.core.errors import DataError
from drivetrain.core.lazy import torch

OnError = Literal["raise", "skip"]
MaxSkipped = Annotated[float, Ge(0)]  # below 1: a share of the samples; else a count

Sample = TypeVar("Sample")


class Unreachable(DataError):
    """Not the sample is at fault but the way to it: never skipped, for it may be there the next time."""


class BadSamplePolicy:
    """on_error=raise: a sample that cannot be read ends the run, its file named."""

    def __init__(self, name: Callable[[int], str]) -> None:
        self.name = name

    def read(self, index: int, sample: Callable[[int], Sample]) -> Sample:
        """Sample `index`, or what stands for it."""
        return sample(index)

    def skipped(self) -> list[str]:
        """The names of the samples that others stood for, whichever process met them."""
        return []


class Skip(BadSamplePolicy):
    """on_error=skip: the next index that reads stands for a broken one, so that the order is the same whoever reads it.

    Broken samples are marked in memory that worker processes share. Raises DataError once there are more than `most`.
    """

    def __init__(self, name: Callable[[int], str], samples: int, most: float) -> None:
        super().__init__(name)
        self.most = math.ceil(most * samples) if most < 1 else int(most)
        self.broken = torch.zeros(samples, dtype=torch.uint8).share_memory_()

    def read(self, index: int, sample: Callable[[int], Sample]) -> Sample:
        count = len(self.broken)
        for tried in (i % count for i in range(index, index + count)):
            if self.broken[tried]:
                continue
            try:
                return sample(tried)
            except Unreachable:
                raise
            except DataError as error:
                self._mark(tried, error)
        raise DataError(f"none of the {count} samples can be read (on_error=skip): mend the data")

    def _mark(self, index: int, error: DataError) -> None:
        self.broken[index] = 1
        found = int(self.broken.sum())
        if found > self.most:
            raise DataError(
                f"{found} of {len(self.broken)} samples cannot be read, data.max_skipped allows {self.most}; the last: {error}"
            )

    def skipped(self) -> list[str]:
        return [self.name(i) for i in self.broken.nonzero().flatten().tolist()]


def policy(on_error: OnError, most: float, samples: int, name: Callable[[int], str]) -> BadSamplePolicy:
    """The policy that the knobs on_error and max_skipped say; `name(index)` is a sample's name for messages."""
    return Skip(name, samples, most) if on_error == "skip" else BadSamplePolicy(name)
