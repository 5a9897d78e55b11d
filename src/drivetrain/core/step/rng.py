"""Random numbers without state: every random choice about the data is a function of (seed, epoch, index, stream).

Therefore it is the same in every worker, thread and rank, on every device, and after a resume.
"""

from __future__ import annotations

from drivetrain.core.lazy import torch

_MASK = (1 << 63) - 1


def mix(*numbers: int) -> int:
    """A 63-bit seed made of several numbers (by the finaliser of splitmix64, Steele et al. 2014)."""
    h = 0x9E3779B97F4A7C15
    for number in numbers:
        h = (h ^ (number & (2**64 - 1))) & (2**64 - 1)
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        h ^= h >> 31
    return h & _MASK


def permutation(seed: int, epoch: int, n: int) -> torch.Tensor:
    """The order of `n` samples in one epoch, as indices (n,)."""
    generator = torch.Generator().manual_seed(mix(seed, epoch, 1))
    return torch.randperm(n, generator=generator)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift: >> of int64 would copy the sign bit


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return number - (1 << 64) if number >= (1 << 63) else number


def keys(seed: int, epoch: int, indices: torch.Tensor, stream: int) -> torch.Tensor:
    """One seed of 63 bits for each sample index (n,)."""
    return _hashed(seed, epoch, indices, stream) & _MASK


def uniform(seed: int, epoch: int, indices: torch.Tensor, stream: int) -> torch.Tensor:
    """One float32 in [0, 1) for each sample index (n,), the same on every device."""
    return _shift(_hashed(seed, epoch, indices, stream), 40).float() * 2.0**-24  # 24 bits are exact in float32


def _hashed(seed: int, epoch: int, indices: torch.Tensor, stream: int) -> torch.Tensor:
    """64 bits for each sample index, as int64."""
    x = indices ^ mix(seed, epoch, stream, 2)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)
