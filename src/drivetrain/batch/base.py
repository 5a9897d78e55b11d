"""Batch size: the number of samples per update, and their split into micro-batches.

`global_batch`, or `tokens`, determines the result; `accumulation_steps` and the ranks only split it.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import tee
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from annotated_types import Ge

from drivetrain.core import order as orders
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.option import BuildContext, Count, Effect, Option, RunSpec
from drivetrain.core.order import Bounds, Order, Reader, index_of, share
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import Source
from drivetrain.core.typed import JsonObject, StateDict
from drivetrain.core.world import World

logger = logging.getLogger(__name__)

Scaling = Literal["none", "linear", "sqrt"]
DecayScaling = Literal["none", "timescale"]
Factor = Annotated[int, Ge(2)]
LARGEST = 1 << 40  # largest update in samples, in a run of any length


@dataclass(eq=False)
class Batch(Option, groups.Batch):
    """batch=fixed: every rank takes its share of the global batch in one forward.

    With `grow_every` the global batch is multiplied by `grow_by` every `grow_every` epochs, up to `grow_until`, instead of
    lowering the learning rate (Smith et al. 2018); micro-batches keep their size, so memory does not grow.

    With `tokens` an update takes the next samples of the epoch's order up to that many tokens: update u has the samples that
    end within [u·T, (u+1)·T) of the order's tokens, so that all epochs have equally many updates. `global_batch` is derived.
    """

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"
    key_effects: ClassVar[Mapping[str, Effect]] = dict.fromkeys(
        ("global_batch", "tokens", "lr_scaling", "decay_scaling", "base_batch", "grow_every", "grow_by", "grow_until"), "changes"
    )
    takes_tokens: ClassVar[bool] = True  # an update may be given in tokens

    global_batch: Count = 128
    tokens: Count | None = None
    lr_scaling: Scaling = "none"
    decay_scaling: DecayScaling = "none"
    base_batch: Count = 256
    grow_every: Count | None = None
    grow_by: Factor = 2
    grow_until: Count | None = None
    plan: Literal["noise"] | None = None
    preallocate: bool = False

    def __post_init__(self) -> None:
        self._configured = self.accumulation_steps
        self.found: JsonObject | None = None  # basis of a measured size
        self.pairs = False  # each sample gets a partner to be mixed with (mixup, CutMix)
        self.evaluated: int | None = None  # samples in a forward of an evaluation; None: those of a micro-batch
        self.together = 1  # samples that an evaluation keeps in one batch, for losses that compare samples
        self.lengths: torch.Tensor | None = None  # (n,) tokens of each training sample, for sequences
        self.order = orders.shuffled(0)  # of the training samples; set by `over`
        self.weighs_by_length = True  # True if the loss averages over tokens, False if over samples of different lengths
        self._stages: list[tuple[int, Batch]] = []  # each stage's first epoch and batch; [] if all are equal

    def validate(self, run: RunSpec) -> Iterator[str]:
        ranks = run.parallel.data_ranks()
        parts = self.accumulation_steps * ranks
        if self.global_batch % parts and self.tokens is None:
            below, above = self.global_batch // parts * parts, math.ceil(self.global_batch / parts) * parts
            near = " or ".join(str(n) for n in (below, above) if n)
            yield (
                f"batch.global_batch={self.global_batch} does not divide into {self.accumulation_steps} steps × {ranks} ranks: "
                f"set batch.global_batch to {near}"
            )
        if self.grow_until is not None and self.grow_every is None:
            yield f"batch.grow_until={self.grow_until} needs batch.grow_every, the epochs between two growths"
        if self.grow_until is not None and self.tokens is None and self.grow_until < self.global_batch * self.grow_by:
            yield (
                f"batch.grow_until={self.grow_until} is below batch.global_batch × batch.grow_by = "
                f"{self.global_batch * self.grow_by}, so that nothing would grow: raise it"
            )
        if self.plan is not None and (self.by_length or self.grow_every or self.needs_trial or run.stages):
            yield f"batch.plan={self.plan} plans the stages of one batch: leave out batch.tokens, batch.grow_every and stages"
        elif self.plan is not None and (parts < 2 or run.values["epochs"] < 2):
            yield (
                f"batch.plan={self.plan} measures the gradient noise scale of an update's parts, and plans whole epochs: set "
                "batch=accumulate batch.accumulation_steps=2 epochs=2, or more of them"
            )
        if self.tokens is not None and not self.takes_tokens:
            yield f"batch.tokens and {run.named('batch')} exclude each other (it finds a number of samples): set batch=accumulate"
        setting, instead = f"batch.tokens={self.tokens}", "batch.tokens=null"
        if self.buckets_lengths:
            setting, instead = run.named("batch"), "batch=fixed"
        if self.by_length and not (run.data.tokens or run.data.may_differ_in_length):
            yield f"{setting} sorts by length, but all samples of {run.named('data')} are equally long: set {instead}"
        if self.by_length and run.data.order not in ("shuffled", "shuffled" if self.buckets_lengths else "sequential"):
            yield f"data.order={run.data.order} and {setting} exclude each other (it goes by length): set {instead}"

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.data.tokens and run.compile.specializes_on_shapes:
            yield (
                f"{run.named('batch')} pads {run.named('data')} to other lengths in every batch, and {run.named('compile')} "
                "compiles for each anew, or for any: batch=bucketed keeps to a few"
            )
        if self.decay_scaling != "none" and not run.optimizer.decays_by_lr:
            yield f"batch.decay_scaling is for a decay of lr × weight_decay, and {run.named('optimizer')} has another"

    def setup(self, context: BuildContext) -> None:
        run = context.run
        self.pairs = any(step.mixes for step in run.augment) and run.debug.augments
        kinds = run.loss.takes if run.data.targets is None else (run.data.targets,)
        self.weighs_by_length = kinds == ("tokens",)
        self.together, self.evaluated = run.loss.evaluated_together, run.values["evaluate_batch"]
        self.order = run.data.order_of(context.data.train, run)
        self.measure(context.data.train, context.seed, context.parallel.data_world)

    def over(self, order: Order) -> Self:
        """Return a copy for one run, which counts and requests training samples in this order."""
        made = self.copied()
        made.order = order
        return made

    @property
    def by_length(self) -> bool:
        """True if the samples' lengths decide which of them are in an update."""
        return self.buckets_lengths or self.tokens is not None

    def measure(self, source: Source, seed: int, world: World) -> None:
        """Read the lengths of the training samples. Must be called before anything that counts updates. Raises UserError."""
        self.lengths, self._seed = source.lengths, seed
        if not self.by_length:
            return
        if self.lengths is None:
            raise UserError(
                "batch=bucketed sorts by length, batch.tokens counts it, but these samples do not report it: set "
                "batch=fixed batch.tokens=null"
            )
        if self.tokens is None:
            return
        self._all_tokens, longest = int(self.lengths.sum()), int(self.lengths.max())
        if self.tokens < longest:
            raise UserError(f"batch.tokens={self.tokens} is less than the longest sample, of {longest} tokens: set it to more")
        parts = self.accumulation_steps * world.size
        self.global_batch = max(1, self.tokens * len(self.lengths) // (self._all_tokens * parts)) * parts
        self._ends, self._read_in = lru_cache(2)(self._update_ends), lru_cache(None)(self._samples_of)

    def _tokens(self, epoch: int) -> int:
        """Return the tokens of an update in an epoch."""
        return int(self.tokens or 0) * (self.size(epoch) // self.global_batch)

    def _update_ends(self, seed: int, epoch: int) -> list[int]:
        """Return the number of samples up to the end of each update, in an epoch's order: those whose tokens end before it."""
        assert self.lengths is not None
        ends, size = self.lengths[index_of(self.order(seed, epoch))].cumsum(0), self._tokens(epoch)
        marks = torch.arange(size, self._all_tokens + size, size)
        return list(torch.searchsorted(ends, marks, right=True).tolist())

    def _samples_of(self, epoch: int, drop_last: bool) -> int:
        return self._ends(self._seed, epoch)[self.updates(0, epoch, drop_last) - 1]

    def lr_factor(self) -> float:
        """Return the factor of the learning rate (linear: Goyal et al. 2017; sqrt: Krizhevsky 2014)."""
        ratio = self.global_batch / self.base_batch
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]

    def decay_factor(self) -> float:
        """Return the factor of the weight decay: it keeps 1 / (lr × decay) constant in samples (Wang & Aitchison 2024)."""
        return self.global_batch / self.base_batch / self.lr_factor() if self.decay_scaling == "timescale" else 1.0

    def sizes(self) -> tuple[object, ...]:
        """Return the settings that determine the samples of each update."""
        return (self.buckets_lengths, self.global_batch, self.tokens, self.grow_every, self.grow_by, self.grow_until)

    def of_stages(self, stages: Sequence[tuple[int, Batch]]) -> Self:
        """Return this option with each stage's own batch sizes, from the stage's first epoch on."""
        return self.with_values(_stages=list(stages))

    @property
    def differs_by_stage(self) -> bool:
        """True if the run's stages differ in update size, so that each consists of whole epochs."""
        return bool(self._stages)

    def size(self, epoch: int) -> int:
        """Return the samples of one update in an epoch."""
        return next((batch for start, batch in reversed(self._stages) if epoch >= start), self)._own_size(epoch)

    def _own_size(self, epoch: int) -> int:
        size = self.global_batch
        for _ in range(epoch // self.grow_every if self.grow_every else 0):
            if size >= LARGEST or (self.grow_until is not None and size * self.grow_by > self.grow_until):
                break
            size *= self.grow_by
        return size

    def micro_batch(self, world: World) -> int:
        """Return the maximum number of samples in one rank's forward."""
        return math.ceil(self.global_batch / (self.accumulation_steps * world.size))

    def smallest(self, samples: int, world: World) -> int:
        """Return the samples in the smallest forward of an update of this size."""
        count = math.ceil(math.ceil(samples / world.size) / self.micro_batch(world))
        return max(1, samples // world.size // count)

    def updates(self, samples: int, epoch: int, drop_last: bool) -> int:
        """Return the number of updates in an epoch over `samples`."""
        if self.tokens is not None:
            tokens, each = self._all_tokens, self._tokens(epoch)
            return tokens // each if drop_last else math.ceil(tokens / each)
        return samples // self.size(epoch) if drop_last else math.ceil(samples / self.size(epoch))

    def consumed(self, samples: int, epoch: int, window: int, drop_last: bool) -> int:
        """Return the samples trained on after all epochs before `epoch` plus `window` updates."""
        if self.tokens is not None:
            before = sum(self._read_in(e, drop_last) for e in range(epoch))
            return before + (self._ends(self._seed, epoch)[window - 1] if window else 0)
        before = self._over_epochs(epoch, lambda e: min(samples, self.updates(samples, e, drop_last) * self.size(e)))
        return before + min(samples, window * self.size(epoch))

    def total_updates(self, samples: int, epochs: int, drop_last: bool) -> int:
        """Return the number of updates in a run of `epochs`; 0 if an epoch has none, or lengths are to be read first."""
        if self.by_length and self.lengths is None:
            return 0
        if not all(self.updates(samples, stretch[-1], drop_last) for stretch in self.stretches(epochs)):
            return 0
        return self._over_epochs(epochs, lambda e: self.updates(samples, e, drop_last))

    def _over_epochs(self, epochs: int, amount: Callable[[int], int]) -> int:
        """Sum an amount over the epochs."""
        return sum(len(stretch) * amount(stretch.start) for stretch in self.stretches(epochs))

    def stretches(self, epochs: int) -> list[range]:
        """Return the epochs of a run, grouped by the size of their updates."""
        if not self._stages:
            return self._own_stretches(epochs)
        ends = [*(start for start, _ in self._stages[1:]), epochs]
        found = []
        for (begin, batch), end in zip(self._stages, ends, strict=True):
            clipped = (range(max(begin, own.start), min(end, own.stop)) for own in batch._own_stretches(epochs))
            found += [stretch for stretch in clipped if stretch]
        return found

    def _own_stretches(self, epochs: int) -> list[range]:
        every = self.grow_every or epochs
        starts = range(0, min(epochs, every * LARGEST.bit_length()), max(1, every))
        return [range(start, end) for start, end in zip(starts, [*starts[1:], epochs], strict=False)]

    def requests(
        self,
        seed: int,
        epoch: int,
        world: World,
        drop_last: bool,
        skip: int = 0,
    ) -> Iterator[Request]:
        """Yield this rank's micro-batches of one epoch in order, from update number `skip` on.

        Update u takes positions [u·G, (u+1)·G) of the epoch's order, which are split evenly among ranks and micro-batches.
        Each micro-batch is weighted by its samples (by its tokens if samples are sequences), so that an update is the mean over
        its samples even if they do not divide evenly, as in the short last batch.
        """
        total, again = self.updates(self.order.length, epoch, drop_last), self.order.repeats
        windows = self._windows(seed, epoch, drop_last, skip)
        for update, (amount, parts) in enumerate(self._parts(self._reader(seed, epoch), windows, world, epoch), skip):
            for step, part in enumerate(parts, 1):
                weight, last = part.amount * world.size / amount, step == len(parts)
                yield Request(epoch, part.indices, weight, last, last and update + 1 == total, part.partners, update, again)

    def _reader(self, seed: int, epoch: int) -> Reader:
        """Return the reader of the epoch's order; each update takes one part."""
        return self.order.reader(seed, epoch)

    def _windows(self, seed: int, epoch: int, drop_last: bool, skip: int = 0) -> Iterator[Bounds]:
        """Yield each update's part of an epoch's order, from update number `skip` on."""
        length, size = self.order.length, self.size(epoch)
        total = self.updates(length, epoch, drop_last)
        ends = range(size, total * size + 1, size) if self.tokens is None else self._ends(seed, epoch)
        for update in range(skip, total):
            yield ends[update - 1] if update else 0, min(ends[update], length)

    def _parts(self, read: Reader, windows: Iterator[Bounds], world: World, epoch: int) -> Iterator[tuple[int, list[Part]]]:
        """Yield each update's number of averaged items, and this rank's micro-batches of it.

        With sample lengths the whole update is read, because its weight counts all ranks' tokens.
        """
        if self.lengths is None or not (self.by_length or self.weighs_by_length):
            splits, again = tee((window, self._split(window, world)) for window in windows)
            reads = read(self._widened(part, window[0]) for window, parts in again for part in parts)
            for window, parts in splits:
                yield window[1] - window[0], [self._part(next(reads), part, window[0]) for part in parts]
            return
        windows, whole = tee(windows)
        for window, numbers in zip(windows, read(whole), strict=True):
            if self.by_length:
                mine = self._dealt(numbers, world, epoch)
            else:
                mine = [numbers[start - window[0] : end - window[0]] for start, end in self._split(window, world)]
            yield self.amount(numbers), [Part(each, n) if (n := self.amount(each)) else Part(numbers[:1], 0) for each in mine]

    def _widened(self, part: Bounds, first: int) -> Bounds:
        """Return the positions to read for a part: with its samples' partners, and with one sample for an empty part.

        With fewer samples than ranks, a rank without any joins the all-reduce with a sample of weight 0.
        """
        start, end = part if part[1] > part[0] else (first, first + 1)
        return (start & ~1, min(self.order.length, (end + 1) & ~1)) if self.pairs else (start, end)

    def _part(self, numbers: torch.Tensor, part: Bounds, first: int) -> Part:
        if not self.pairs:
            return Part(numbers, part[1] - part[0])
        start, end = part if part[1] > part[0] else (first, first + 1)
        positions = torch.arange(start, end)
        partners = (positions ^ 1).clamp_(max=self.order.length - 1)  # positions 2i and 2i + 1 are partners
        return Part(numbers[positions - (start & ~1)], part[1] - part[0], numbers[partners - (start & ~1)])

    def _split(self, window: Bounds, world: World) -> list[Bounds]:
        """Return this rank's micro-batches of an update: consecutive samples.

        Every rank makes as many as the rank with the most samples, because their forwards may wait for each other.
        """
        mine = share(window, world.size, world.rank)
        count = math.ceil(math.ceil((window[1] - window[0]) / world.size) / self.micro_batch(world))
        return [share(mine, count, number) for number in range(count)]

    def _dealt(self, window: torch.Tensor, world: World, epoch: int) -> Sequence[torch.Tensor]:
        """Return this rank's micro-batches of an update: samples dealt by length, so that all have about equal work."""
        assert self.lengths is not None
        mine = window[self.lengths[index_of(window)].argsort(descending=True, stable=True)][world.rank :: world.size]
        steps = self._turns(len(window), world, epoch)
        return [mine[step::steps] for step in range(steps)]

    def _turns(self, samples: int, world: World, epoch: int) -> int:
        """Return the number of micro-batches per rank for an update, equal on all ranks."""
        return min(math.ceil(samples / world.size), self.accumulation_steps * (self.size(epoch) // self.global_batch))

    def amount(self, indices: torch.Tensor) -> int:
        """Return the number of items that the loss averages over: the tokens of these samples (n,), or the samples."""
        if self.lengths is None or not self.weighs_by_length:
            return indices.numel()
        return int(self.lengths[index_of(indices)].sum())

    def evaluation(self, source: Source, world: World) -> Sequence[torch.Tensor]:
        """Return the batches of an evaluation, as indices: every sample once, sequences of similar length together."""
        lengths = source.lengths
        order = torch.arange(len(source)) if lengths is None else lengths.argsort(stable=True)
        if self.tokens is not None and lengths is not None and self.evaluated is None:
            most = max(1, self.tokens // (self.accumulation_steps * world.size))
            return order.tensor_split(split_by_cost(lengths[order].tolist(), most).ends[:-1])
        return torch.split(order, math.ceil((self.evaluated or self.micro_batch(world)) / self.together) * self.together)

    def evaluation_requests(self, source: Source, world: World, max_batches: int | None, lockstep: bool = False) -> list[Request]:
        """Return this rank's share of the first `max_batches` batches of an evaluation.

        With `lockstep` all ranks get the same number of batches; filler batches have weight 0.
        """
        batches = self.evaluation(source, world)[:max_batches]
        count = math.ceil(len(batches) / world.size) * world.size if lockstep else len(batches)
        numbers = range(world.rank, count, world.size)
        return [Request(0, batches[min(n, len(batches) - 1)], float(n < len(batches))) for n in numbers]

    def evaluation_rounds(self, source: Source, world: World, max_batches: int | None) -> int:
        """Return the largest number of batches of any rank in an evaluation."""
        return math.ceil(len(self.evaluation(source, world)[:max_batches]) / world.size)

    def largest(self, samples: int, size: int) -> torch.Tensor:
        """Return the micro-batch of `size` samples that needs the most memory: the longest samples, if they have lengths."""
        order = torch.arange(samples) if self.lengths is None else self.lengths.argsort(descending=True, stable=True)
        return order[torch.arange(size) % samples]

    def halve(self, world: World) -> bool:
        """Halve the micro-batch and double `accumulation_steps`. Returns False if it is one sample already."""
        if self.micro_batch(world) == 1:
            return False
        self.accumulation_steps *= 2
        return True

    def state_dict(self) -> StateDict:
        """Return the current split, so that a resumed run repeats it."""
        return {"configured": self._configured, "steps": self.accumulation_steps}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a `state_dict()`, unless the config now sets another split."""
        if state["configured"] == self._configured:
            self.accumulation_steps = state["steps"]


@dataclass(eq=False)
class Accumulate(Batch):
    """Sums the gradients of `accumulation_steps` micro-batches before each update: the same result in less memory."""

    effect = "close"
    changes = "gradients are summed over micro-batches, and BatchNorm takes the statistics of each"
    accumulation_steps: Count = 4


class Part(NamedTuple):
    """One micro-batch of an update."""

    indices: torch.Tensor  # (n,)
    amount: int  # items that the loss averages over; 0 for a filler
    partners: torch.Tensor | None = None  # (n,) the samples that these are mixed with


class BatchEnds(NamedTuple):
    """The end of each batch in samples sorted by length."""

    ends: list[int]
    last_is_short: bool  # the last batch could hold more samples


def split_by_cost(costs: Sequence[int], budget: int) -> BatchEnds:
    """Split samples of ascending costs into batches: a batch costs its number of samples times its last one's cost."""
    ends, end = [], 0
    while end < len(costs):
        start = end
        count = bisect_right(range(1, len(costs) - start + 1), budget, key=lambda n: n * costs[start + n - 1])
        end = start + max(1, count)
        ends.append(end)
    return BatchEnds(ends, (end - start + 1) * costs[-1] <= budget)
