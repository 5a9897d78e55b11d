"""A moving average of the weights, evaluated in addition to the weights themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options import horizon as horizons
from drivetrain.core.options.option import BuildContext, CountOrZero, Effect, Length, Option, RunSpec, Share
from drivetrain.core.step import streams
from drivetrain.core.step.architecture import tied_names
from drivetrain.core.step.microbatch import Request
from drivetrain.core.typed import StateDict

# Relative widths of power-function averages: the narrowest spans a thousandth of the run; 1 / √12 = 0.289 is the plain mean.
NARROWEST, BELOW = 0.001, 0.28
Width = Annotated[float, Ge(NARROWEST), Lt(BELOW)]
STATISTICS = ("running_mean", "running_var")  # buffers with means over batches, by torch's names


class Ema(Option, groups.Ema):
    """ema=none: no average is kept."""

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"
    started = True  # False until the first average, which is the weights themselves till then
    stale = False  # True if all ranks have to complete the average before its use

    def update(self) -> None:
        """Add the current weights to the average, after an update that was not skipped."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Set the model to the averaged weights. On exit, also after an exception, its own weights are restored."""
        yield

    def state_dict(self) -> StateDict:
        """The state for a resumed run."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load `state_dict()`."""


class Kept(Ema):
    """Base class for a single average. A subclass's `update` decides when the average moves, and how far.

    The running statistics of norms are averaged too, or copied; other buffers are copied: a mask of -inf, the vectors of a
    spectral norm or a counter have no mean. Buffers that are not saved with the weights, such as tables of positions, are not
    part of the average. The average of 16-bit weights is float32, because 16 bits would round small changes away.
    """

    effect = "changes"
    changes = "an average of the weights is evaluated too; the weights train as before"
    active = True
    buffers = "average"

    def setup(self, context: BuildContext) -> None:
        """Start the average from the model's weights."""
        model = context.model
        averaged: dict[str, torch.Tensor] = dict(model.named_parameters())
        copied: dict[str, torch.Tensor] = {}
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name not in saved:
                continue
            average = name.rpartition(".")[2] in STATISTICS and self.buffers == "average"
            (averaged if average else copied)[name] = buffer
        self._names, self._phases = list(averaged) + list(copied), context.phases
        self._tied = tied_names(model)
        self._live = [t.detach() for t in averaged.values()]
        self._live_copied = [t.detach() for t in copied.values()]
        self._mean = [t.to(torch.promote_types(t.dtype, torch.float32), copy=True) for t in self._live]
        self._copied = [t.clone() for t in self._live_copied]
        self._widened = any(mean.dtype != t.dtype for mean, t in zip(self._mean, self._live, strict=True))
        self._updates = 0

    def update(self) -> None:
        self._updates += 1

    def _move(self, mean: list[torch.Tensor], share: float, live: list[torch.Tensor] | None = None) -> None:
        """Move an average towards the weights, or towards `live`, by this share of the distance."""
        live = self._live if live is None else live  # detached, so that no graph is kept
        if self._widened:
            live = [t.to(m.dtype) for t, m in zip(live, mean, strict=True)]
        torch._foreach_lerp_(mean, live, share)

    def _copy_buffers(self) -> None:
        """Copy the buffers that are not averaged."""
        if self._copied:
            torch._foreach_copy_(self._copied, self._live_copied)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        live = self._live + self._live_copied
        held = [t.clone() for t in live]
        torch._foreach_copy_(live, self._mean + self._copied)
        try:
            yield
        finally:
            torch._foreach_copy_(live, held)

    def state_dict(self) -> StateDict:
        tensors = dict(zip(self._names, self._mean + self._copied, strict=True))
        return {"updates": self._updates, "tensors": tensors, "tied": dict(self._tied)}

    def load_state_dict(self, state: StateDict) -> None:
        if not state:  # the checkpoint has no average: start from the loaded weights
            torch._foreach_copy_(self._mean + self._copied, self._live + self._live_copied)
            return
        self._updates = state["updates"]
        for name, tensor in zip(self._names, self._mean + self._copied, strict=True):
            tensor.copy_(state["tensors"][name])


class Average(Kept):
    """Exponential moving average: average ← decay · average + (1 - decay) · weights, after each update that was not skipped.

    With `warmup` the decay after n updates is min(decay, (1 + n) / (10 + n)), as in TensorFlow's ExponentialMovingAverage, so
    that early weights are soon forgotten.
    """

    effect = "changes"

    def __init__(self, decay: Share = 0.999, warmup: bool = True, buffers: Literal["average", "copy"] = "average") -> None:
        self.decay, self.warmup, self.buffers = decay, warmup, buffers

    def update(self) -> None:
        super().update()
        n = self._updates
        decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        resting = {p.data_ptr() for phase in self._phases if not phase.made for p in phase.parameters}
        if resting:  # parameters that this update did not touch keep their average
            rows = [(m, t) for m, t in zip(self._mean, self._live, strict=True) if t.data_ptr() not in resting]
            self._move([m for m, _ in rows], 1.0 - decay, [t for _, t in rows])
        else:
            self._move(self._mean, 1.0 - decay)
        self._copy_buffers()


class Swa(Kept):
    """Stochastic weight averaging (Izmailov et al. 2018): average ← average + (weights - average) / (n + 1), after n weights.

    It averages from `start` on, once in `every`. It equals torch.optim.swa_utils.AveragedModel with averaged buffers, followed by
    `update_bn` before each evaluation and save: averaged BatchNorm statistics do not belong to the averaged weights. Only the
    number of updates decides whether an update's weights count, so that a resumed run averages the same ones.
    """

    effect = "changes"

    def __init__(self, start: Length = 0.75, every: Length = "1ep", statistics_updates: CountOrZero = 20) -> None:
        self.start, self.every, self.statistics_updates = start, every, statistics_updates

    def validate(self, run: RunSpec) -> Iterator[str]:
        wrong = [*horizons.length_problem("ema.start", self.start), *horizons.length_problem("ema.every", self.every)]
        yield from wrong
        horizon = horizons.run_horizon(run)
        if wrong or horizon is None:
            return
        if (start := horizon.in_updates(self.start)) >= horizon.updates:
            yield (
                f"ema.start={self.start} is update {start:g}, and the run ends with update {horizon.updates}, so that nothing "
                "would be averaged: set ema.start=0.75"
            )

    def setup(self, context: BuildContext) -> None:
        super().setup(context)
        horizon, self._progress = context.horizon, context.progress
        self._start, self._end = horizon.in_updates(self.start), horizon.updates
        self._every = max(1, round(horizon.in_updates_at_end(self.every)))
        self._statistics = NormStatistics(context, self.statistics_updates) if self.statistics_updates else None
        kept = dict(zip(self._names, self._mean + self._copied, strict=True))
        self._of_norms = [(buffer, kept[name]) for name, buffer in self._statistics.buffers()] if self._statistics else []
        self.stale = False  # True if the norms' statistics belong to an earlier average

    @property
    def started(self) -> bool:  # type: ignore[override]
        """True if weights have been averaged. Until then the current weights are used as the average."""
        return self._updates > 0

    def update(self) -> None:
        at = self._progress.updates
        if at <= self._start or (self._end - at) % self._every:
            return
        super().update()
        self._move(self._mean, self.share(at))  # the first weights are copied
        self._copy_buffers()
        self.stale = True

    def share(self, at: int) -> float:
        """The share of the distance that the average moves to the weights of update `at`."""
        return 1 / self._updates

    @contextmanager
    def swapped(self) -> Iterator[None]:
        if not self.started:
            torch._foreach_copy_(self._mean + self._copied, self._live + self._live_copied)
        with super().swapped():
            if self.stale and self._statistics is not None:
                self._statistics.estimate()
                for buffer, kept in self._of_norms:
                    kept.copy_(buffer)
            self.stale = False
            yield

    def state_dict(self) -> StateDict:
        if self.stale or not self.started:
            with self.swapped():
                pass
        return super().state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self.stale = False  # the saved average has its own statistics


class Merge(Swa):
    """Merges weights of a constant learning rate instead of decaying it (WSM, Tian et al. 2025; linear: LAWA, Kaddour 2022).

    It collects n weights from `start` on, once in `every`. Number j has the weight curve(j / n) - curve((j + 1) / n), with the
    replaced decay as the curve, from 1 to 0. An update then moves the merged weights as far as under a decayed rate.
    """

    effect = "changes"

    def __init__(
        self,
        start: Length = 0.8,
        every: Length = 0.02,
        shape: Literal["linear", "cosine", "sqrt"] = "sqrt",
        statistics_updates: CountOrZero = 20,
    ) -> None:
        super().__init__(start, every, statistics_updates)
        self.shape = shape

    def share(self, at: int) -> float:
        count = math.ceil((self._end - self._start) / self._every)
        number = count - 1 - (self._end - at) // self._every
        here, after = (self._curve(n / count) for n in (number, number + 1))
        return (here - after) / (1 - after)

    def _curve(self, t: float) -> float:
        return {"linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2, "sqrt": 1 - math.sqrt(t)}[self.shape]


class NormStatistics:
    """Estimates the running statistics of a model's BatchNorms, as torch.optim.swa_utils.update_bn does.

    They are means over the micro-batches of the first `updates` updates of epoch 0. So a resumed run, and any split of a batch
    over micro-batches and ranks, uses the same samples. Frozen norms keep their statistics.
    """

    def __init__(self, context: BuildContext, updates: int) -> None:
        self._context, self._updates = context, updates
        norms = torch.nn.modules.batchnorm._BatchNorm
        self._norms = {name: m for name, m in context.model.named_modules() if isinstance(m, norms) and m.track_running_stats}
        if self._norms and not context.parallel.own_forward:
            raise UserError(
                f"{context.run.named('ema')} estimates BatchNorm's statistics by forwards of the whole model, but with "
                f"{context.run.named('parallel')} each rank holds only a part: set ema.statistics_updates=0, or parallel=ddp"
            )

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and the live buffers of the norms."""
        for name, norm in self._norms.items():
            for of_norm, buffer in norm.named_buffers(recurse=False):
                yield f"{name}.{of_norm}".removeprefix("."), buffer

    def estimate(self) -> None:
        """Estimate the norms' statistics for the model's current weights. Called on all ranks."""
        context, parallel = self._context, self._context.parallel
        context.model.train()
        norms = [norm for norm in self._norms.values() if norm.training]
        if not norms:
            return
        model = context.model_call.taking_batches(parallel.inference_model(context.model))
        joined = context.loss.joined
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
        try:
            with streams.apart(), parallel.evaluation_context():  # dropout draws random numbers
                for batch in context.read(self._requests()):
                    with context.precision.autocast():
                        model(joined(batch.x))
                for norm in norms:
                    for name in ("running_mean", "running_var"):
                        statistic: torch.Tensor = getattr(norm, name)
                        statistic.copy_(parallel.all_reduce_sum(statistic) / parallel.data_world.size)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum

    def _requests(self) -> Iterator[Request]:
        """Yield this rank's micro-batches of epoch 0's first updates, without a partial last batch if there are whole ones."""
        context = self._context
        batch, left = context.batch, self._updates
        drop_last = batch.updates(batch.order.length, 0, True) > 0
        for request in batch.requests(context.seed, 0, context.parallel.data_world, drop_last):
            yield request
            left -= request.last
            if not left:
                return
