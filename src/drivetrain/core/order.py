"""The order of samples in training: a pure function of (seed, epoch), so that a resume is an offset.

An order gives the numbers of samples. A sample that comes again in an epoch has a number of its own there, from which its draws
and its augmentation follow: its index, plus AGAIN for each time before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.core import rng
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch

AGAIN = 1 << 40
DRAWN = 13  # of the random numbers that samples are drawn by

Indices = Callable[[int, int], "torch.Tensor"]  # (seed, epoch) → (n,)


@dataclass(frozen=True)
class Order:
    """The order of `length` samples in each epoch, out of so many `samples`."""

    length: int
    samples: int
    indices: Indices
    repeats: bool = False  # whether a sample may come several times
    setting: str = ""  # for messages, where a user's code gives the order

    def __call__(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the numbers (length,) of an epoch's samples. Raises UserError where a user's code gives no such order."""
        found = self.indices(seed, epoch)
        if self.setting:
            found = self._checked(found, epoch)
        return numbered(found) if self.repeats else found

    def _checked(self, found: object, epoch: int) -> torch.Tensor:
        tensor = torch.as_tensor(found)
        if tensor.ndim != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise UserError(f"{self.setting} gives {list(tensor.shape)} of {tensor.dtype}: let it return whole numbers (n,)")
        if len(tensor) != self.length:
            raise UserError(
                f"{self.setting} gives {len(tensor)} samples in epoch {epoch + 1}, and {self.length} in the first one: let all "
                "epochs have as many, since the updates are counted before the run"
            )
        if len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < self.samples:
            raise UserError(f"{self.setting} gives sample {int(tensor.max())} in epoch {epoch + 1}, and there are {self.samples}")
        return tensor.long()


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


def shuffled(samples: int) -> Order:
    """A random permutation in each epoch."""
    return Order(samples, samples, lambda seed, epoch: rng.permutation(seed, epoch, samples))


def sequential(samples: int) -> Order:
    """The samples as they are."""
    return Order(samples, samples, lambda seed, epoch: torch.arange(samples))


def weighted(weights: torch.Tensor) -> Order:
    """As many draws as there are samples, with replacement, in proportion to weights (n,)."""
    ends = weights.double().cumsum(0)
    if not len(ends) or not float(ends[-1]) > 0 or not bool(torch.isfinite(ends[-1])) or bool((weights < 0).any()):
        raise UserError("data.order=weighted needs weights that are finite, not below 0 and not all 0: mend the Dataset's")

    def drawn(seed: int, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rng.mix(seed, epoch, DRAWN))
        at = torch.rand(len(ends), generator=generator, dtype=torch.float64) * ends[-1]
        return torch.searchsorted(ends, at, right=True).clamp_(max=len(ends) - 1)

    return Order(len(ends), len(ends), drawn, repeats=True)


def balanced(labels: torch.Tensor) -> Order:
    """As many draws as there are samples, with replacement, of which each class has the same share."""
    return weighted(1 / labels.bincount()[labels])


def repeated(samples: int, times: int) -> Order:
    """A random permutation in which each sample comes so many times in a row, up to as many as there are samples."""
    return Order(
        samples, samples, lambda seed, epoch: rng.permutation(seed, epoch, samples).repeat_interleave(times)[:samples],
        repeats=times > 1,
    )  # fmt: skip
