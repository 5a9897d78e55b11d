"""Groups sequences of similar length into batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import ClassVar

from drivetrain.batch.base import Batch, BatchEnds, split_by_cost
from drivetrain.core import order as orders
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Count, RunSpec
from drivetrain.core.order import Bounds, Reader, index_of
from drivetrain.core.step import rng
from drivetrain.core.step.source import Source
from drivetrain.core.world import World

logger = logging.getLogger(__name__)

REPORT_UPDATES = 100  # updates for the report at the start


@dataclass(eq=False)
class Bucketed(Batch):
    """Puts samples of similar length into each update, so that batches have little padding and ranks have equal work.

    Lengths are padded to multiples of `pad_to`. An epoch shuffles the samples, sorts them by padded length (stably: samples of
    one length stay shuffled), splits them into updates and shuffles the updates; all ranks and micro-batches of an update have
    about the same length. With `tokens` each update is filled up to that number, padding included, so that batches of short
    samples are larger.
    """

    effect = "changes"
    changes = "the choice of samples per update: similar lengths together"
    buckets_lengths: ClassVar[bool] = True
    fixed_micro_batches: ClassVar[bool] = False

    accumulation_steps: Count = 1
    pad_to: Count = 32

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.cudnn_benchmark and run.runtime.device != "cpu":
            yield (
                "batch=bucketed has batches of several shapes, and runtime.cudnn_benchmark=true tries its kernels anew for each: "
                "set runtime.cudnn_benchmark=false"
            )

    def measure(self, source: Source, seed: int, world: World) -> None:
        super().measure(source, seed, world)
        assert self.lengths is not None
        self.padded = padded(self.lengths, self.pad_to, int(self.lengths.max()))
        self._batch_ends = lru_cache(self._compute_ends)  # by the epoch's update size, which may grow
        if world.rank == 0:
            logger.info(self._report(world))

    def _compute_ends(self, size: int) -> BatchEnds:
        costs = self.padded.sort().values.tolist()
        if self.tokens is None:
            return split_by_cost([1] * len(costs), size)
        return split_by_cost(costs, max(self.tokens, costs[-1]) * (size // self.global_batch))

    def updates(self, samples: int, epoch: int, drop_last: bool) -> int:
        batches = self._batch_ends(self.size(epoch))
        return len(batches.ends) - int(batches.last_is_short and drop_last)

    def consumed(self, samples: int, epoch: int, window: int, drop_last: bool) -> int:
        before = self._over_epochs(epoch, lambda e: self._batch_ends(self.size(e)).ends[self.updates(samples, e, drop_last) - 1])
        return before + sum(end - start for start, end in islice(self._windows(self._seed, epoch, drop_last), window))

    def _windows(self, seed: int, epoch: int, drop_last: bool, skip: int = 0) -> Iterator[Bounds]:
        """Yield each update's part of the samples sorted by length, the updates shuffled."""
        ends = [0, *self._batch_ends(self.size(epoch)).ends]
        updates = self.updates(len(self.padded), epoch, drop_last)
        return ((ends[n], ends[n + 1]) for n in rng.permutation(rng.mix(seed, 6), epoch, updates)[skip:].tolist())

    def _reader(self, seed: int, epoch: int) -> Reader:
        order = self.order(seed, epoch)
        return orders.slices_of(order[self.padded[order].argsort(stable=True)])

    def _in_turn(self, lengths: torch.Tensor, world: World) -> tuple[torch.Tensor, int]:
        """Return each sample's micro-batch, counted rank by rank, and a rank's micro-batches, as in `_dealt`."""
        steps = self._turns(len(lengths), world, 0)
        place = torch.empty_like(lengths)
        place[lengths.argsort(descending=True, stable=True)] = torch.arange(len(lengths))
        return place % world.size * steps + place // world.size % steps, steps

    def _report(self, world: World) -> str:
        """Describe the share of padding and the imbalance of the ranks' work in the first updates, against batch=fixed."""
        assert self.lengths is not None
        plain = Batch(self.global_batch).over(orders.shuffled(len(self.lengths)))
        plain.accumulation_steps, plain.lengths = self.accumulation_steps, self.lengths
        longest = int(self.lengths.max())
        figures = []
        for batch, pad_to in ((plain, 1), (self, self.pad_to)):
            real = whole = busiest = 0
            windows = list(islice(batch._windows(self._seed, 0, False), REPORT_UPDATES))
            for (start, end), numbers in zip(windows, batch._reader(self._seed, 0)(windows), strict=True):
                lengths = self.lengths[index_of(numbers)].long()
                if batch is self:
                    of, steps = self._in_turn(lengths, world)
                else:
                    sizes = [b - a for rank in range(world.size) for a, b in batch._split((start, end), World(rank, world.size))]
                    of, steps = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)), len(sizes) // world.size
                longest_of = torch.zeros(world.size * steps, dtype=torch.int64).scatter_reduce_(0, of, lengths, "amax")
                work = of.bincount(minlength=len(longest_of)) * padded(longest_of, pad_to, longest)
                real, whole = real + int(lengths.sum()), whole + int(work.sum())
                busiest += int(work.view(world.size, steps).amax(0).sum())
            figures.append((1 - real / whole, busiest * world.size / whole - 1))
        (padding, imbalance), (padding_now, imbalance_now) = figures
        unequal = f", ranks wait for the busiest {imbalance:.1%} → {imbalance_now:.1%}" if world.size > 1 else ""
        return (
            f"batch=bucketed: padding {padding:.1%} → {padding_now:.1%} of the tokens{unequal} (compared with batch=fixed); "
            f"{len(set(self.padded.tolist()))} lengths"
        )


def padded(lengths: torch.Tensor, multiple: int, longest: int) -> torch.Tensor:
    """Round lengths (n,) up to a multiple, at most to the data's longest, because a model may not take more."""
    return (-(-lengths // multiple) * multiple).clamp_(max=longest)
