"""The source of each position of a mixture's order: a pure function of the position, exact in whole numbers.

The sources are the leaves of a binary tree (Huffman's, by weight). Of the first p positions of a node, floor(p × share + 1/2)
belong to its left branch, so each prefix keeps every source within 1.5 samples of its share.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain.core.lazy import torch
from drivetrain.core.step import rng

BITS = 31  # of a share; exact up to 2^32 positions, and 210 samples off at 10^12
SHUFFLED_STREAM = 17


class Node(NamedTuple):
    """A branch: the share of its left part, in units of 2^-31, and two nodes or numbers of sources."""

    share: int
    left: Node | int
    right: Node | int


def tree(weights: Sequence[float]) -> Node | int:
    """Return the tree over sources of these weights; a source of weight 0 is not in it."""
    heap: list[tuple[float, int, Node | int]] = [(weight, number, number) for number, weight in enumerate(weights) if weight > 0]
    heapq.heapify(heap)
    for number in range(len(weights), len(weights) + len(heap) - 1):
        (light, _, left), (heavy, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (light + heavy, number, Node(round(light / (light + heavy) * 2**BITS), left, right)))
    return heap[0][2]


def _of_left(p: torch.Tensor, share: int) -> torch.Tensor:
    """Return floor(p × share / 2^31 + 1/2) without more than 63 bits."""
    low = (1 << BITS) - 1
    return (p >> BITS) * share + (((p & low) * share + (1 << (BITS - 1))) >> BITS)


@dataclass(frozen=True)
class Mixture:
    """Sources by their weights, which change at some positions: `starts` ascend from 0, with `weights` (k,) for each."""

    weights: Sequence[Sequence[float]]
    starts: Sequence[int] = (0,)
    window: int = 1  # positions within which the sources are shuffled

    def counts(self, position: int) -> list[int]:
        """Return the number of samples of each source before a position: exact at the ends of windows."""
        found = [0] * len(self.weights[0])

        def walk(node: Node | int, n: int) -> None:
            if isinstance(node, int):
                found[node] += n
                return
            of_left = (n * node.share + (1 << (BITS - 1))) >> BITS
            walk(node.left, of_left)
            walk(node.right, n - of_left)

        for weights, start, end in zip(self.weights, self.starts, (*self.starts[1:], position), strict=True):
            walk(tree(weights), max(0, min(end, position) - start))
        return found

    def at(self, seed: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the source of each position (n,), and the number of this source's samples before it (n,)."""
        positions = self._shuffled(seed, positions)
        source, index = torch.empty_like(positions), torch.empty_like(positions)

        def down(node: Node | int, rows: torch.Tensor, n: torch.Tensor, taken: Sequence[int]) -> None:
            if isinstance(node, int):
                source[rows], index[rows] = node, n + taken[node]
                return
            before = _of_left(n, node.share)
            left = _of_left(n + 1, node.share) > before
            down(node.left, rows[left], before[left], taken)
            down(node.right, rows[~left], (n - before)[~left], taken)

        stretch = torch.bucketize(positions, torch.tensor(self.starts), right=True) - 1
        for number in stretch.unique().tolist():
            rows = (stretch == number).nonzero().flatten()
            start = self.starts[number]
            down(tree(self.weights[number]), rows, positions[rows] - start, self.counts(start))
        return source, index

    def _shuffled(self, seed: int, positions: torch.Tensor) -> torch.Tensor:
        """Return the positions, permuted within each window by the hashes of its members."""
        first = positions - positions % self.window
        windows, of = torch.unique(first, return_inverse=True)
        members = windows.unsqueeze(1) + torch.arange(self.window)
        place = rng.keys(seed, 0, members, SHUFFLED_STREAM).argsort(1)[of, positions - first]
        shuffled: torch.Tensor = windows[of] + place
        return shuffled
