"""What happens when a sample cannot be read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from annotated_types import Ge

from drivetrain.core.errors import DataError
from drivetrain.core.lazy import torch

OnError = Literal["raise", "skip"]
MaxSkipped = Annotated[float, Ge(0)]  # below 1: a share of the samples; else a number of them

Sample = TypeVar("Sample")


class NetworkError(DataError):
    """A sample could not be fetched. It is never skipped: the sample is not at fault, and may arrive the next time."""


class BadSamplePolicy:
    """on_error=raise: a sample that cannot be read ends the run, and the error names its file."""

    def __init__(self, name: Callable[[int], str]) -> None:
        self.name = name

    def read(self, index: int, read_sample: Callable[[int], Sample]) -> Sample:
        """Return `read_sample(index)`, or the sample that replaces a bad one."""
        return read_sample(index)

    def skipped(self) -> list[str]:
        """Return the names of the samples that were replaced, in this process or in its workers."""
        return []

    def renewed(self, samples: int, name: Callable[[int], str]) -> BadSamplePolicy:
        """Return the same policy for other samples."""
        return BadSamplePolicy(name)


class SkipBadSamples(BadSamplePolicy):
    """on_error=skip: the next index that can be read replaces a bad one, so every reader gets the same samples.

    Bad samples are marked in memory that worker processes share. Raises DataError once there are more than `max_skipped`.
    """

    def __init__(self, name: Callable[[int], str], samples: int, max_skipped: float) -> None:
        super().__init__(name)
        self.given = max_skipped
        self.max_skipped = math.ceil(max_skipped * samples) if max_skipped < 1 else int(max_skipped)
        self.bad = torch.zeros(samples, dtype=torch.uint8).share_memory_()

    def read(self, index: int, read_sample: Callable[[int], Sample]) -> Sample:
        count = len(self.bad)
        for candidate in (i % count for i in range(index, index + count)):
            if self.bad[candidate]:
                continue
            try:
                return read_sample(candidate)
            except NetworkError:
                raise
            except DataError as error:
                self._mark(candidate, error)
        raise DataError(f"none of the {count} samples can be read (on_error=skip): mend the data")

    def _mark(self, index: int, error: DataError) -> None:
        self.bad[index] = 1
        found = int(self.bad.sum())
        if found > self.max_skipped:
            raise DataError(
                f"{found} of {len(self.bad)} samples cannot be read, data.max_skipped allows {self.max_skipped}; "
                f"the last: {error}"
            )

    def skipped(self) -> list[str]:
        return [self.name(i) for i in self.bad.nonzero().flatten().tolist()]

    def renewed(self, samples: int, name: Callable[[int], str]) -> BadSamplePolicy:
        return SkipBadSamples(name, samples, self.given)


def bad_sample_policy(on_error: OnError, max_skipped: float, samples: int, name: Callable[[int], str]) -> BadSamplePolicy:
    """Return the policy of the knobs on_error and max_skipped; `name(index)` is what messages call a sample."""
    return SkipBadSamples(name, samples, max_skipped) if on_error == "skip" else BadSamplePolicy(name)
