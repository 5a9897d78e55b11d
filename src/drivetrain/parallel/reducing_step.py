"""Averages gradients over the ranks without hooks, so that the whole step can be recorded as one graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import WrappingStep


@dataclass(eq=False)
class ReducingStep(WrappingStep):
    """Averages the gradients over all ranks after the backward of an update's last micro-batch, in buckets.

    DDP's all-reduces are in hooks of autograd, which a graph does not call. These are torch's functional collectives, which
    a recording holds and inductor compiles. They are the same whether the step runs op by op, is recorded or is a graph, so
    that a rank which cannot record it does not hold up the others.
    """

    parameters: Mapping[str, torch.nn.Parameter]  # by name
    ranks: int
    bucket_bytes: float
    sent_as: torch.dtype | None  # dtype in which gradients travel; None: their own
    some_unused: bool | None  # whether weights may have no gradient on some ranks; None: all ranks run the same graph

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.inner.micro_batch(batch, loss_sum)
        if batch.last:
            with torch.no_grad():
                if self.some_unused is not None:
                    self._complete()
                self._average([p.grad for p in self.parameters.values() if p.grad is not None])

    def _complete(self) -> None:
        """Give weights that have a gradient on another rank one of zeros. Raises UserError where none may be missing."""
        import torch.distributed as dist

        missing = [name for name, p in self.parameters.items() if p.grad is None]
        if not self.some_unused:
            if missing:
                raise unused(missing)
            return
        parameters = list(self.parameters.values())
        anywhere = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
        for p, has_gradient in zip(parameters, anywhere.tolist(), strict=True):
            if has_gradient and p.grad is None:
                p.grad = torch.zeros_like(p)

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        import torch.distributed as dist
        from torch.distributed import _functional_collectives as collectives

        world: Any = dist.group.WORLD
        buckets = list(_buckets(gradients, self.bucket_bytes))
        flat = [torch.cat([g.reshape(-1) for g in bucket]) for bucket in buckets]
        shares = [(f if self.sent_as is None else f.to(self.sent_as)) / self.ranks for f in flat]
        means = [collectives.all_reduce(share, "sum", world) for share in shares]  # all begin before one is waited for
        for bucket, mean in zip(buckets, means, strict=True):
            parts = collectives.wait_tensor(mean).split([g.numel() for g in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))


def unused(names: Sequence[str]) -> UserError:
    """Return the error of an update in which parameters of these names got no gradient."""
    plain = [name.removeprefix("model.").replace("_orig_mod.", "") for name in names[:3]]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return UserError(
        f"parallel=ddp waits for the gradients of all parameters, and {', '.join(plain)}{more} got none in an update: set "
        "parallel.find_unused_parameters=true, or freeze them (model.freeze)"
    )


def _buckets(gradients: Sequence[torch.Tensor], most: float) -> Iterator[list[torch.Tensor]]:
    """Yield gradients of one dtype that are `most` bytes together, or a single larger one, the last layers' first."""
    bucket: list[torch.Tensor] = []
    for gradient in reversed(gradients):
        if bucket and (sum(g.nbytes for g in bucket) + gradient.nbytes > most or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
