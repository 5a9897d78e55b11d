"""The order of samples in training: a pure function of (seed, epoch), so that a resume is an offset.

An order gives the numbers of samples. A sample that comes again in an epoch has a number of its own there, from which its draws
and its augmentation follow: its index, plus AGAIN for each time before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.step import rng

# The order of the training samples. A number: each comes so many times in a row, up to as many as there are samples.
Sampling = Literal["shuffled", "sequential", "balanced", "weighted", "repeated", "own"] | Annotated[int, Ge(2), Le(100)]
REPEATS = 3  # times in a row, of repeated augmentation as DeiT has it
AGAIN = 1 << 40
DRAWN = 13  # of the random numbers that samples are drawn by

Indices = Callable[[int, int], "torch.Tensor"]  # (seed, epoch) → (n,)


@dataclass(frozen=True)
class Order:
    """The order of samples in each epoch, which has always as many."""

    length: int
    indices: Indices
    repeats: bool = False  # whether a sample may come several times

    def __call__(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the numbers (length,) of an epoch's samples. Raises UserError where they are not as many as in the first."""
        found = self.indices(seed, epoch)
        if len(found) != self.length:
            raise UserError(
                f"data.order gives {len(found)} samples in epoch {epoch + 1} of seed {seed}, and {self.length} in the first one "
                "of seed 0: let all have as many, since the updates are counted before the run. Samples that are held out for "
                "the validation are left out of them, and where samples come again as often: set data.validation to a set of "
                "its own, or null"
            )
        return numbered(found) if self.repeats else found


def checked(order: Callable[[int, int], object], samples: int, setting: str, seed: int, epoch: int) -> torch.Tensor:
    """Return the indices that the order of a user's code gives. Raises UserError where they are none."""
    try:
        found = torch.as_tensor(order(seed, epoch))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{setting} gives no whole numbers (n,): {type(error).__name__}: {error}") from error
    if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise UserError(f"{setting} gives {list(found.shape)} of {found.dtype}: let it return whole numbers (n,)")
    if (wrong := found[(found < 0) | (found >= samples)]).numel():
        raise UserError(f"{setting} gives sample {int(wrong[0])} in epoch {epoch + 1}, and there are 0 to {samples - 1}")
    return found.long()


def index_of(numbers: torch.Tensor) -> torch.Tensor:
    """Return the indices (n,) of samples in their source."""
    return numbers & (AGAIN - 1)


def numbered(indices: torch.Tensor) -> torch.Tensor:
    """Return the numbers of samples, of which some come again."""
    by_index = indices.argsort(stable=True)
    counts = indices.bincount()
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)  # where the run of a sample begins
    times = torch.empty_like(indices)
    times[by_index] = torch.arange(len(indices)) - first
    return indices + times * AGAIN


def sequential(samples: int) -> Order:
    """The samples as they are."""
    return Order(samples, lambda seed, epoch: torch.arange(samples))


def weighted(weights: torch.Tensor) -> Order:
    """As many draws as there are samples, with replacement, in proportion to weights (n,)."""
    ends = weights.double().cumsum(0)
    if not len(ends) or not float(ends[-1]) > 0 or not bool(torch.isfinite(ends[-1])) or bool((weights < 0).any()):
        raise UserError("data.order=weighted needs weights that are finite, not below 0 and not all 0: mend those of the Dataset")

    def drawn(seed: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rng.mix(seed, epoch, DRAWN))
        at = torch.rand(len(ends), generator=generator, dtype=torch.float64) * ends[-1]
        return torch.searchsorted(ends, at, right=True).clamp_(max=len(ends) - 1)

    return Order(len(ends), drawn, repeats=True)


def balanced(labels: torch.Tensor) -> Order:
    """As many draws as there are samples, with replacement, of which each class has the same share."""
    _, of_each, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    return weighted(1 / counts[of_each])


def shuffled(samples: int, times: int = 1) -> Order:
    """A random permutation in which each sample comes so many times in a row, up to as many as there are samples."""
    return Order(
        samples, lambda seed, epoch: rng.permutation(seed, epoch, samples).repeat_interleave(times)[:samples], repeats=times > 1
    )
