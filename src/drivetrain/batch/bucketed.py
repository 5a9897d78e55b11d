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
from drivetrain.core.step import rng
from drivetrain.core.step.source import Source
from drivetrain.core.world import World

logger = logging.getLogger(__name__)

REPORT_UPDATES = 100  # updates that the report at the start is computed from


@dataclass(eq=False)
class Bucketed(Batch):
    """Puts samples of similar length into each update, so that batches have little padding and ranks have equal work.

    Lengths are padded to multiples of `pad_to`. An epoch shuffles the samples, sorts them by padded length (stably: samples of
    one length stay shuffled), splits them into updates and shuffles the updates; all ranks and micro-batches of an update have
    about the same length. With `tokens` each update is filled up to so many, padding included: short samples come in larger
    batches.
    """

    effect = "changes"
    changes = "which samples meet in an update: those of similar length"
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
        self._batch_ends = lru_cache(self._compute_ends)  # by the epoch's size of an update, which may grow
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
        return before + int(sum(s.stop - s.start for s in islice(self._slices(self._seed, epoch, drop_last), window)))

    def _slices(self, seed: int, epoch: int, drop_last: bool) -> Iterator[slice]:
        """Return each update's slice of the sorted order, the updates shuffled."""
        ends = [0, *self._batch_ends(self.size(epoch)).ends]
        updates = self.updates(len(self.padded), epoch, drop_last)
        return (slice(ends[n], ends[n + 1]) for n in rng.permutation(rng.mix(seed, 6), epoch, updates).tolist())

    def _windows(self, seed: int, epoch: int, drop_last: bool, skip: int = 0) -> Iterator[torch.Tensor]:
        order = self.order(seed, epoch)
        order = order[self.padded[order].argsort(stable=True)]
        return (order[part] for part in islice(self._slices(seed, epoch, drop_last), skip, None))

    def _report(self, world: World) -> str:
        """Describe the share of padding and the imbalance of the ranks' work in the first updates, against batch=fixed."""
        assert self.lengths is not None
        samples, longest = len(self.lengths), int(self.lengths.max())
        ranks = [World(rank, world.size) for rank in range(world.size)]
        plain = Batch(self.global_batch).over(orders.shuffled(samples))
        plain.accumulation_steps, plain.lengths = self.accumulation_steps, self.lengths
        figures = []
        for batch, pad_to in ((plain, 1), (self, self.pad_to)):
            updates = [islice(batch.requests(self._seed, 0, r, False), REPORT_UPDATES * self.accumulation_steps) for r in ranks]
            work = [[_work(self.lengths[r.indices], pad_to, longest) for r in mine] for mine in updates]
            real, whole = (sum(w[i] for mine in work for w in mine) for i in (0, 1))
            busiest = sum(max(w[1] for w in together) for together in zip(*work, strict=False))
            figures.append((1 - real / whole, busiest * world.size / whole - 1))
        (padding, imbalance), (padding_now, imbalance_now) = figures
        unequal = f", ranks wait for the busiest {imbalance:.1%} → {imbalance_now:.1%}" if world.size > 1 else ""
        return (
            f"batch=bucketed: padding {padding:.1%} → {padding_now:.1%} of the tokens{unequal} (beside batch=fixed); "
            f"{len(set(self.padded.tolist()))} lengths"
        )


def padded(lengths: torch.Tensor, multiple: int, longest: int) -> torch.Tensor:
    """Round lengths (n,) up to a multiple, but not beyond the data's longest: a model may not take more."""
    return (-(-lengths // multiple) * multiple).clamp_(max=longest)


def _work(lengths: torch.Tensor, multiple: int, longest: int) -> tuple[int, int]:
    """Return the tokens of a micro-batch, without and with padding."""
    return int(lengths.sum()), len(lengths) * int(padded(lengths.max(), multiple, longest))
