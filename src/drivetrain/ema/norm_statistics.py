"""BatchNorm's statistics of weights that were not trained, such as an average of weights, estimated from training data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from drivetrain.core import streams
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


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
