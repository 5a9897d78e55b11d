"""Groups sequences of similar length into batches."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from drivetrain.batch.base import Batch
from drivetrain.core import order as orders
from drivetrain.core import rng
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import Count, RunSpec
from drivetrain.core.source import Source
from drivetrain.core.world import World

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

REPORT_UPDATES = 100  # updates that the report at the start is computed from


class BatchEnds(NamedTuple):
    """The end of each update in the samples sorted by padded length. The same in every epoch."""

    ends: list[int]
    last_is_short: bool  # the last update could hold more samples


@dataclass(eq=False)
class Bucketed(Batch):
    """Puts samples of similar length into each update, so that batches have little padding and ranks have equal work.

    Lengths are padded to multiples of `pad_to`. An epoch shuffles the samples, sorts them by padded length (stably: samples of
    one length stay shuffled), splits them into updates and shuffles the updates; all ranks and micro-batches of an update have
    about the same length. `budget=samples` puts `global_batch` samples into each update. `budget=tokens` fills each update
    up to the padded tokens of `global_batch` of the longest samples, so that short samples come in larger batches.
    """

    effect = "changes"
    changes = "which samples meet in an update: those of similar length"
    buckets_lengths: ClassVar[bool] = True
    fixed_micro_batches: ClassVar[bool] = False

    accumulation_steps: Count = 1
    budget: Literal["samples", "tokens"] = "samples"
    pad_to: Count = 32

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not (run.data.tokens or run.data.may_differ_in_length):
            yield f"batch=bucketed sorts by length, and all samples of {run.named('data')} are alike: set batch=fixed"
        if run.data.order != "shuffled":
            yield f"data.order={run.data.order} and batch=bucketed exclude each other (it orders by length): set batch=fixed"

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.cudnn_benchmark and run.runtime.device != "cpu":
            yield (
                "batch=bucketed has batches of several shapes, and runtime.cudnn_benchmark=true tries its kernels anew for each: "
                "set runtime.cudnn_benchmark=false"
            )

    def measure(self, source: Source, seed: int, world: World) -> None:
        super().measure(source, seed, world)
        if self.lengths is None:
            raise UserError(
                "batch=bucketed sorts by length, and these samples do not differ in it, or do not tell it: set batch=fixed"
            )
        self._seed = seed
        self.padded = padded(self.lengths, self.pad_to, int(self.lengths.max()))
        self._batch_ends = lru_cache(self._compute_ends)  # by the size of an update, which may grow
        logger.info(self._report(world))

    def _compute_ends(self, size: int) -> BatchEnds:
        return split_by_cost(self.padded.sort().values, size, self.budget == "tokens")

    def total_updates(self, samples: int, epochs: int, drop_last: bool) -> int:
        return (
            super().total_updates(samples, epochs, drop_last) if self.lengths is not None else 0
        )  # unknown before the data is read

    def updates(self, samples: int, epoch: int, drop_last: bool) -> int:
        batches = self._batch_ends(self.size(epoch))
        return len(batches.ends) - (batches.last_is_short and drop_last)

    def consumed(self, samples: int, epoch: int, window: int, drop_last: bool) -> int:
        before = self._over_epochs(epoch, lambda e: self._batch_ends(self.size(e)).ends[self.updates(samples, e, drop_last) - 1])
        return before + sum(s.stop - s.start for s in islice(self._slices(self._seed, epoch, drop_last), window))

    def _slices(self, seed: int, epoch: int, drop_last: bool) -> Iterator[slice]:
        """Return each update's slice of the sorted order, the updates shuffled."""
        ends = [0, *self._batch_ends(self.size(epoch)).ends]
        updates = self.updates(len(self.padded), epoch, drop_last)
        return (slice(ends[n], ends[n + 1]) for n in rng.permutation(rng.mix(seed, 6), epoch, updates).tolist())

    def _windows(self, seed: int, epoch: int, drop_last: bool, skip: int = 0) -> Iterator[torch.Tensor]:
        """Yield each update's samples, from update number `skip` on."""
        order = rng.permutation(seed, epoch, len(self.padded))
        order = order[self.padded[order].argsort(stable=True)]
        return (order[part] for part in islice(self._slices(seed, epoch, drop_last), skip, None))

    def requests(
        self,
        seed: int,
        epoch: int,
        world: World,
        drop_last: bool,
        skip: int = 0,
    ) -> Iterator[Request]:
        """Yield this rank's micro-batches of one epoch in order, from update number `skip` on, weighted by their tokens.

        An update's samples are sorted by length and distributed round-robin, so that all ranks and micro-batches get about
        the same number of tokens.
        """
        total = self.updates(len(self.padded), epoch, drop_last)
        for update, window in enumerate(self._windows(seed, epoch, drop_last, skip), skip + 1):
            chunks = self._round_robin(window, world, self.size(epoch) // self.global_batch)
            tokens = self.amount(window)
            for step, indices in enumerate(chunks, 1):
                weight = self.amount(indices) * world.size / tokens
                last = step == len(chunks)
                # Fewer samples than ranks: this rank joins the all-reduce with a sample of weight 0.
                yield Request(epoch, indices if len(indices) else window[:1], weight, last, last and update == total)

    def _round_robin(self, window: torch.Tensor, world: World, growth: int) -> list[torch.Tensor]:
        """Return this rank's micro-batches of an update."""
        assert self.lengths is not None
        mine = window[self.lengths[window].argsort(descending=True, stable=True)][world.rank :: world.size]
        max_samples = -(-len(window) // world.size)  # of any rank; all ranks make the same number of micro-batches
        steps = min(max_samples, self.accumulation_steps * growth)
        return [mine[step::steps] for step in range(steps)]

    def evaluation(self, source: Source, world: World) -> Sequence[torch.Tensor]:
        if source.lengths is None:
            return super().evaluation(source, world)
        order = source.lengths.argsort(stable=True)
        return order.tensor_split(
            split_by_cost(source.lengths[order], self.micro_batch(world), self.budget == "tokens").ends[:-1]
        )

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
            f"{len(self.padded.unique())} lengths"
        )


def padded(lengths: torch.Tensor, multiple: int, longest: int) -> torch.Tensor:
    """Round lengths (n,) up to a multiple, but not beyond the data's longest: a model may not take more."""
    return (-(-lengths // multiple) * multiple).clamp_(max=longest)


def _work(lengths: torch.Tensor, multiple: int, longest: int) -> tuple[int, int]:
    """Return the tokens of a micro-batch, without and with padding."""
    return int(lengths.sum()), len(lengths) * int(padded(lengths.max(), multiple, longest))


def split_by_cost(padded: torch.Tensor, size: int, by_tokens: bool) -> BatchEnds:
    """Split ascending lengths into batches of `size` samples, or of the padded tokens of `size` of the longest samples."""
    costs = padded.tolist() if by_tokens else [1] * len(padded)
    budget, ends, end = size * costs[-1], [], 0
    while end < len(costs):
        start = end
        count = bisect_right(range(1, len(costs) - start + 1), budget, key=lambda n: n * costs[start + n - 1])
        end = start + max(1, count)
        ends.append(end)
    return BatchEnds(ends, (end - start + 1) * costs[-1] <= budget)
