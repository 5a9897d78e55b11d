"""Randomness without state: everything random about the data is a function of (seed, epoch, index, stream).

So it is the same in any worker, thread or rank, on any device, the first time or after a resume.
"""

from __future__ import annotations

from drivetrain.core.lazy import torch

_MASK = (1 << 63) - 1


def mix(*words: int) -> int:
    """A 63-bit seed out of several numbers (the finaliser of splitmix64, Steele et al. 2014)."""
    h = 0x9E3779B97F4A7C15
    for word in words:
        h = (h ^ (word & (2**64 - 1))) & (2**64 - 1)
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        h = (h ^ (h >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        h ^= h >> 31
    return h & _MASK


def permutation(seed: int, epoch: int, n: int) -> torch.Tensor:
    """The order of `n` samples in one epoch, as indices (n,)."""
    generator = torch.Generator().manual_seed(mix(seed, epoch, 1))
    return torch.randperm(n, generator=generator)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical: int64's >> would drag the sign in


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= (1 << 63) else word


def uniform(seed: int, epoch: int, indices: torch.Tensor, stream: int) -> torch.Tensor:
    """One float32 in [0, 1) for each sample index (n,), the same on every device."""
    x = indices ^ mix(seed, epoch, stream, 2)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift(x, 31)
    return _shift(x, 40).float() * 2.0**-24  # 24 bits: exact in float32
