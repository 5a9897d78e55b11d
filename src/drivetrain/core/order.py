"""The order of samples in training: a pure function of (seed, epoch), so that a resume is an offset.

An order gives the numbers of samples. A sample that repeats in an epoch has its own number there, which decides its draws and its
augmentation: its index, plus AGAIN for each earlier time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from annotated_types import Ge, Le

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.step import rng

# The order of the training samples. A number: each sample repeats that many times in a row, up to the number of samples.
Sampling = Literal["shuffled", "sequential", "balanced", "weighted", "repeated", "own"] | Annotated[int, Ge(2), Le(100)]
REPEATS = 3  # times in a row, of repeated augmentation as in DeiT
AGAIN = 1 << 40
DRAWN = 13  # of the random numbers that draw samples

WHOLE = 10_000_000  # samples of the largest shuffled order drawn as one tensor; a larger one is computed in blocks
BLOCK = 65_536  # positions of a block: 50 ns each, against 3 µs each for blocks of 128
AHEAD = 4_096  # most parts of an order computed together

Indices = Callable[[int, int], "torch.Tensor"]  # (seed, epoch) → (n,)
Bounds = tuple[int, int]  # the positions of a part of an epoch's order: the first one, and the end
At = Callable[[int, int, "torch.Tensor"], "torch.Tensor"]  # (seed, epoch, positions (n,)) → the numbers of their samples (n,)
Reader = Callable[[Iterable[Bounds]], Iterator["torch.Tensor"]]  # the numbers of the samples of each part


@dataclass(frozen=True)
class Order:
    """The order of samples in each epoch; all epochs have the same length. With `at`, parts can be computed separately."""

    length: int
    indices: Indices
    repeats: bool = False  # whether a sample may repeat
    at: At | None = None

    def reader(self, seed: int, epoch: int) -> Reader:
        """Return the function that reads parts of an epoch's order. Raises UserError like a call."""
        return slices_of(self(seed, epoch)) if self.at is None else partial(_in_blocks, partial(self.at, seed, epoch))

    def __call__(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the numbers (length,) of an epoch's samples.

        Raises UserError where their number differs from the first epoch's.
        """
        found = self.indices(seed, epoch)
        if len(found) != self.length:
            raise UserError(
                f"data.order gives {len(found)} samples in epoch {epoch + 1} of seed {seed}, and {self.length} in the first one "
                "of seed 0: let all have as many, since the updates are counted before the run. Samples that are held out for "
                "the validation are left out of them, and where samples come again as often: set data.validation to a set of "
                "its own, or null"
            )
        return numbered(found) if self.repeats and self.at is None else found


def checked(order: Callable[[int, int], object], samples: int, setting: str, seed: int, epoch: int) -> torch.Tensor:
    """Return the indices in the order of a user's code. Raises UserError for anything else."""
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
    """Return sample indices, with repeats."""
    by_index = indices.argsort(stable=True)
    counts = indices.bincount()
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)  # the start of a sample's repeats
    times = torch.empty_like(indices)
    times[by_index] = torch.arange(len(indices)) - first
    return indices + times * AGAIN


def sequential(samples: int) -> Order:
    """The samples in the data's order."""
    return Order(samples, lambda seed, epoch: torch.arange(samples), at=lambda seed, epoch, positions: positions)


def weighted(weights: torch.Tensor) -> Order:
    """Weighted sampling with replacement, in proportion to weights (n,): as many draws as samples."""
    ends = weights.double().cumsum(0)
    if not len(ends) or not float(ends[-1]) > 0 or not bool(torch.isfinite(ends[-1])) or bool((weights < 0).any()):
        raise UserError("data.order=weighted needs weights that are finite, not below 0 and not all 0: mend those of the Dataset")

    def drawn(seed: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rng.mix(seed, epoch, DRAWN))
        at = torch.rand(len(ends), generator=generator, dtype=torch.float64) * ends[-1]
        return torch.searchsorted(ends, at, right=True).clamp_(max=len(ends) - 1)

    return Order(len(ends), drawn, repeats=True)


def balanced(labels: torch.Tensor) -> Order:
    """Class-balanced sampling with replacement: as many draws as samples."""
    _, of_each, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    return weighted(1 / counts[of_each])


def shuffled(samples: int, times: int = 1) -> Order:
    """A random permutation in which each sample repeats `times` times in a row, up to the number of samples."""
    if samples > WHOLE:
        return _keyed(samples, times)

    def permuted(seed: int, epoch: int) -> torch.Tensor:
        found = rng.permutation(seed, epoch, samples)
        return found if times == 1 else found.repeat_interleave(times)[:samples]

    return Order(samples, permuted, repeats=times > 1)


def _keyed(samples: int, times: int) -> Order:
    """A shuffled order in which the sample of a position follows from the position alone."""

    def at(seed: int, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        if times == 1:
            return rng.permuted(seed, epoch, samples, positions)
        return rng.permuted(seed, epoch, samples, positions // times) + positions % times * AGAIN

    def whole(seed: int, epoch: int) -> torch.Tensor:
        found = torch.empty(samples, dtype=torch.int64)
        for start in range(0, samples, BLOCK):
            end = min(samples, start + BLOCK)
            found[start:end] = at(seed, epoch, torch.arange(start, end))
        return found

    return Order(samples, whole, repeats=times > 1, at=at)


def slices_of(numbers: torch.Tensor) -> Reader:
    """Return what reads parts of an order that is in memory."""
    return lambda parts: (numbers[start:end] for start, end in parts)


def _in_blocks(at: Callable[[torch.Tensor], torch.Tensor], parts: Iterable[Bounds]) -> Iterator[torch.Tensor]:
    together: list[Bounds] = []
    positions = 0
    for part in parts:
        together.append(part)
        positions += part[1] - part[0]
        if positions >= BLOCK or len(together) == AHEAD:
            yield from _found(at, together)
            together, positions = [], 0
    if together:
        yield from _found(at, together)


def _found(at: Callable[[torch.Tensor], torch.Tensor], parts: list[Bounds]) -> Sequence[torch.Tensor]:
    positions = torch.cat([torch.arange(start, end) for start, end in parts])
    found = torch.cat([at(block) for block in positions.split(BLOCK)])
    return torch.split(found, [end - start for start, end in parts])


def share(part: Bounds, of: int, number: int) -> Bounds:
    """Return one of several equal shares of a part; the first ones have a position more where it does not divide."""
    each, more = divmod(part[1] - part[0], of)
    start = part[0] + number * each + min(number, more)
    return start, start + each + (number < more)
