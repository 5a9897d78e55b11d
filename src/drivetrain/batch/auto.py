"""Finds the micro-batch that fits into memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeGuard

from drivetrain.batch.base import Batch, Scaling
from drivetrain.core.errors import UserError
from drivetrain.core.options.option import BuildContext, Count, Effect, Positive, RunSpec
from drivetrain.core.options.protocols import Trials
from drivetrain.core.typed import JsonMapping, fits

logger = logging.getLogger(__name__)


SEARCH_FACTOR = 1.1  # the largest micro-batch is found to within this factor


@dataclass(eq=False)
class AutoBatch(Batch):
    """Finds the largest micro-batch that fits by trials before the run; gradient accumulation keeps the global batch.

    Trials begin at the forecast size, and only trials decide. Each one runs in a separate process, which may run out of memory.
    A CPU has no memory limit: set `memory_gb`.
    """

    effect = "close"
    changes = "gradients are summed over micro-batches, and BatchNorm takes the statistics of each"
    fixed_micro_batches: ClassVar[bool] = False
    takes_tokens: ClassVar[bool] = False
    untried = "batch=accumulate"

    memory_gb: Positive | None = None

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device_type() == "cpu" and self.memory_gb is None:
            yield "batch=auto on a CPU needs a limit: set batch.memory_gb to what a rank may use, or batch=fixed"

    def choose(self, trials: Trials, recorded: object = None) -> Batch:
        if trials.resumes:  # the checkpoint has the micro-batch
            return self
        largest = self.global_batch // trials.run.parallel.ranks()
        smallest = min(2, largest)  # BatchNorm cannot train on a single sample
        expected = trials.forecast_micro_batch(largest, self.memory_gb)
        limit = _largest_fitting(lambda sizes: trials.count_fitting(sizes, largest, self.memory_gb), smallest, largest, expected)
        if not limit:
            raise UserError(
                f"batch=auto: not even {smallest} samples fit: raise batch.memory_gb, or save memory "
                "(precision=bf16, checkpointing=blocks, a smaller model)"
            )
        tuned = self.with_values(accumulation_steps=math.ceil(largest / limit))
        fits = f"{limit} samples fit" if limit < largest else f"all {largest} samples fit"
        micro = math.ceil(largest / tuned.accumulation_steps)
        began = "" if expected is None else f"; {expected} were forecast"
        logger.info(f"batch=auto: {fits} at once{began}: {tuned.accumulation_steps} steps of {micro} samples on each rank")
        return tuned


def _largest_fitting(fitting: Callable[[Sequence[int]], int], smallest: int, largest: int, expected: int | None) -> int:
    """The largest size that fits, to within SEARCH_FACTOR, 0 if none does: upwards from the expected one, else below it.

    The trials alone decide. A wrong expectation only adds trials.
    """
    start = smallest if expected is None else max(smallest, min(expected, largest))
    sizes = _upwards(start, largest, SEARCH_FACTOR if expected is not None else 2.0)
    if not (count := fitting(sizes)):
        return _below(fitting, smallest, start)
    if count == len(sizes) or not (between := _sizes_between(sizes[count - 1], sizes[count])):
        return sizes[count - 1]
    return [sizes[count - 1], *between][fitting(between)]


def _below(fitting: Callable[[Sequence[int]], int], smallest: int, high: int) -> int:
    """The largest size below `high` that fits, 0 if none does, by trials in growing steps downwards."""
    factor = SEARCH_FACTOR**2
    while high > smallest:
        low = max(smallest, min(high - 1, int(high / factor)))
        sizes = [low, *_sizes_between(low, high)]
        if count := fitting(sizes):
            return sizes[count - 1]
        high, factor = low, min(2.0, factor**2)
    return 0


def _upwards(start: int, largest: int, factor: float) -> list[int]:
    """Sizes from start to the largest in growing steps, at most doubled."""
    sizes, size = [], start
    while size < largest:
        sizes.append(size)
        size, factor = max(size + 1, int(size * factor)), min(2.0, factor**2)
    return [*sizes, largest]


def _sizes_between(low: int, high: int) -> list[int]:
    """Return sizes between low and high, each at most SEARCH_FACTOR times the one before."""
    sizes, size = [], low
    while (size := max(size + 1, int(size * SEARCH_FACTOR))) < high:
        sizes.append(size)
    return sizes


@dataclass(eq=False)
class Critical(Batch):
    """batch=critical: the batch that reaches a target soonest, by the gradient noise scale (McCandlish et al. 2018).

    Before the ranks start, a separate process trains for `look_updates` updates of `global_batch` samples and measures the noise
    scale, the critical batch. By default that is a thirtieth of the run, from 50 to 200 updates: the noise scale is small at the
    start of training. A batch of B samples takes 1 + critical / B times the fewest possible updates.

    - by=time: the process measures how long an update of `global_batch` samples, of twice as many and so on to `max` takes.
      The batch with the least updates × seconds is taken.
    - by=noise: as long as the noise scale is above the batch, it is doubled by more accumulation steps, to `max` at most. The
      run then takes about twice the fewest possible updates and twice the fewest possible samples, on any device.

    The batch stays for the whole run, whose length and schedule are known at its start as those of any other.
    A resumed run keeps the batch that was found, which is in environment.json and result.json.
    """

    effect = "changes"
    changes = "the samples of an update, by a measurement"
    key_effects: ClassVar[Mapping[str, Effect]] = {}
    fixed_micro_batches: ClassVar[bool] = False
    takes_tokens: ClassVar[bool] = False
    untried = "batch=accumulate, and the batch.global_batch that a run by itself finds"
    needs_trial: ClassVar[bool] = True

    global_batch: Count = 32
    max: Count = 1024
    by: Literal["time", "noise"] = "time"
    accumulation_steps: Count = 1
    look_updates: Count | None = None
    lr_scaling: Scaling = "sqrt"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.max < 2 * self.global_batch:
            yield (
                f"batch.max={self.max} leaves nothing to choose, because batch.global_batch={self.global_batch} is doubled: "
                f"set it to {2 * self.global_batch} or more"
            )
        if self.global_batch == 1:
            yield "batch.global_batch=1: the noise scale is measured from two parts of an update: set it to 2 or more"
        if run.loss.compares_samples:
            yield (
                f"batch=critical and {run.named('loss')} exclude each other (a loss that compares the samples of a batch has no "
                "gradient noise scale): set batch=fixed"
            )
        if run.parallel.nnodes > 1:
            yield (
                "batch=critical measures before the ranks of a machine start, and several machines could find different batches: "
                "let one find it, and set batch.global_batch there"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        yield from super().advise(run)
        if self.lr_scaling == "none":
            yield (
                "batch=critical may make the batch several times larger, but batch.lr_scaling=none keeps the learning rate: sqrt "
                "suits AdamW, linear SGD"
            )

    def choose(self, trials: Trials, recorded: object = None) -> Batch:
        ranks = trials.run.parallel.data_ranks()
        limits = {"smallest": self.global_batch, "largest": self.max, "look_updates": self.look_updates, "by": self.by}
        steps = max(2, self.accumulation_steps * ranks)  # the parts of an update that the ranks compute; it takes two to measure
        look = recorded if _is_of(recorded, limits) else trials.look(steps, self.look_updates, self._micro_batches(ranks))
        growth = self._growth(look)
        size, steps = self.global_batch * growth, self.accumulation_steps * (growth if self.by == "noise" else 1)
        measured = {key: look[key] for key in ("noise_scale", "updates", "samples", "update_seconds")}
        return self.with_values(global_batch=size, accumulation_steps=steps, found={**limits, **measured, "global_batch": size})

    def _micro_batches(self, ranks: int) -> list[int]:
        """A rank's micro-batches in the timed updates: of the smallest batch and its doublings."""
        if self.by == "noise":
            return []
        smallest = self.global_batch // (self.accumulation_steps * ranks)
        return [smallest * 2**n for n in range((self.max // self.global_batch).bit_length())]

    def _growth(self, look: JsonMapping) -> int:
        """The power of two by which the smallest batch grows, within the limits and the data."""
        noise, seconds = look["noise_scale"], look["update_seconds"]
        if not noise:
            return 1
        if self.by == "time":
            times = relative_times(noise, self.global_batch, seconds)
            return int(2 ** times.index(min(times))) if times else 1
        most = math.floor(math.log2(max(1.0, min(self.max, look["samples"]) / self.global_batch)))
        return int(2 ** min(max(0, math.ceil(math.log2(noise / self.global_batch))), most))

    def setup(self, context: BuildContext) -> None:
        if self.found is not None and context.world.rank == 0:
            logger.info("%s", self._told(self.found))
        super().setup(context)

    def _told(self, found: JsonMapping) -> str:
        """The line on the measurement and the choice."""
        looked = f"{found['updates']} updates of {found['smallest']} samples"
        chosen = f"{self.global_batch} samples an update, of {found['smallest']} to {found['largest']}"
        if found["noise_scale"] is None:
            return f"batch=critical: the noise of {looked} hides the gradient: {chosen}; a larger batch.look_updates tells more"
        seconds = found["update_seconds"]
        between = " to ".join(f"{1e3 * each:,.3g} ms" for each in (seconds[:1] + seconds[-1:]))
        timed = f" and the time of an update ({between})" if len(seconds) > 1 else ""
        return f"batch=critical: gradient noise scale {found['noise_scale']:,.0f} by {looked}{timed}: {chosen}"


def relative_times(noise_scale: float, smallest: int, update_seconds: Sequence[float]) -> list[float]:
    """The times to a target with the smallest batch and its doublings, from the seconds of their updates.

    They are in units of the fewest possible updates: a batch of B samples takes 1 + noise_scale / B times as many.
    """
    return [seconds * (1 + noise_scale / (smallest * 2**n)) for n, seconds in enumerate(update_seconds)]


def _is_of(recorded: Any, limits: JsonMapping) -> TypeGuard[JsonMapping]:
    """True if a run with these limits recorded it."""
    if not fits(recorded, dict[str, object]) or any(recorded.get(key) != value for key, value in limits.items()):
        return False
    scale, counts = recorded.get("noise_scale"), (recorded.get("samples"), recorded.get("updates"))
    seconds, most = recorded.get("update_seconds"), (limits["largest"] // limits["smallest"]).bit_length()
    good = scale is None or (fits(scale, float) and 0 <= scale < math.inf)
    timed = fits(seconds, list[float]) and len(seconds) <= most and all(0 < each < math.inf for each in seconds)
    return good and timed and all(fits(count, int) and count > 0 for count in counts)
