"""Random numbers without state: every random choice about the data is a function of (seed, epoch, index, stream).

So it is the same in every worker, thread and rank, on every device, and after a resume.
"""

from __future__ import annotations

import math

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


KEYED = 1 << 20  # the stream of the first round: no other stream has such a number
ROUNDS = 8  # after 4, neighbours are visibly dependent (z = 70); after 6, positions and samples are (z = -3)


def permuted(seed: int, epoch: int, n: int, positions: torch.Tensor) -> torch.Tensor:
    """The samples at these positions (m,) of a keyed permutation of n, computed from the positions alone.

    A Feistel network over a × b >= n places (Luby & Rackoff 1988): a position is a pair, and each round adds a hash of one number
    to the other, modulo a or b. A result of n or more goes through again (cycle walking, Black & Rogaway 2002).
    """
    a = math.isqrt(max(0, n - 1)) + 1
    b = -(-n // a)
    found = _rounds(seed, epoch, a, b, positions)
    while (out := (found >= n).nonzero().flatten()).numel():
        found[out] = _rounds(seed, epoch, a, b, found[out])
    return found


def _rounds(seed: int, epoch: int, a: int, b: int, positions: torch.Tensor) -> torch.Tensor:
    left = positions.div(b, rounding_mode="floor")
    right = positions - left * b
    for number in range(ROUNDS):
        changed, size = (right, b) if number % 2 else (left, a)
        bits = _shift(_hashed(seed, epoch, left if number % 2 else right, KEYED + number), 33)
        changed += (bits * size) >> 31
        changed -= (changed >= size) * size
    return left * b + right


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
    x.bitwise_xor_(_shift(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shift(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shift(x, 31))
