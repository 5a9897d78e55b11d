"""ema=swa: the mean of the weights of the last part of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from drivetrain.core import horizon as horizons
from drivetrain.core import streams
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import BuildContext, CountOrZero, Length, RunSpec
from drivetrain.core.typed import StateDict
from drivetrain.ema.base import Kept


class Swa(Kept):
    """Stochastic weight averaging (Izmailov et al. 2018): average ← average + (weights - average) / (n + 1), after n weights.

    It averages from `start` on, once in `every`. It equals torch.optim.swa_utils.AveragedModel with averaged buffers, and
    `update_bn` before it is evaluated or saved: the means of BatchNorm's statistics are not those of the mean weights. Whether
    an update's weights count depends on the number of updates alone, so that a resumed run averages the same ones.
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
        self.stale = False  # whether the norms' statistics are those of another average

    @property
    def started(self) -> bool:  # type: ignore[override]
        """True if weights have been averaged: until then the average is the weights as they are."""
        return self._updates > 0

    def update(self) -> None:
        at = self._progress.updates
        if at <= self._start or (self._end - at) % self._every:
            return
        super().update()
        self._move(self._mean, 1 / self._updates)  # the first weights are taken as they are
        self._copy_buffers()
        self.stale = True

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
        self.stale = False  # what was saved has the statistics of its average


class NormStatistics:
    """Estimates the running statistics of a model's BatchNorms, as torch.optim.swa_utils.update_bn does.

    They are the means over the micro-batches of `updates` updates: the first ones of epoch 0, so that any split of a batch over
    micro-batches and ranks sees the same samples, and a resumed run too. Frozen norms keep theirs.
    """

    def __init__(self, context: BuildContext, updates: int) -> None:
        self._context, self._updates = context, updates
        norms = torch.nn.modules.batchnorm._BatchNorm
        self._norms = {name: m for name, m in context.model.named_modules() if isinstance(m, norms) and m.track_running_stats}
        if self._norms and not context.parallel.own_forward:
            raise UserError(
                f"{context.run.named('ema')} estimates BatchNorm's statistics by forwards of the whole model, and with "
                f"{context.run.named('parallel')} a rank has a part of it: set ema.statistics_updates=0, or parallel=ddp"
            )

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and the live buffers of the norms."""
        for name, norm in self._norms.items():
            for of_norm, buffer in norm.named_buffers(recurse=False):
                yield f"{name}.{of_norm}".removeprefix("."), buffer

    def estimate(self) -> None:
        """Set the norms' buffers to the statistics of the weights that the model has. Called on all ranks."""
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
            with streams.apart(), parallel.evaluation_context():  # dropout draws some
                for batch in context.loader.stream(context.train_data, self._requests(), context.device, context.memory_format):
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
        """Yield this rank's micro-batches of the first updates of epoch 0: whole ones, where there are any."""
        context = self._context
        batch, left = context.batch, self._updates
        drop_last = batch.updates(batch.order.length, 0, True) > 0
        for request in batch.requests(context.seed, 0, context.parallel.data_world, drop_last):
            yield request
            left -= request.last
            if not left:
                return
