"""Batch norms that compute their statistics over the samples of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.core.step.modules import taken_over


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks. Its gradient is the sum of the gradients over the ranks."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class AnyDeviceSyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch.nn.SyncBatchNorm in plain operations, for the devices that torch's own does not run on (a CPU under gloo).

    It computes the mean first and then the squared deviations from it, since a sum of squares would lose precision by
    cancellation. The ranks may have different numbers of samples.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        others = [d for d in range(x.ndim) if d != 1]
        shape = [1, -1, *(1 for _ in others[1:])]
        count = x.new_full((1,), x.numel() // x.shape[1])
        *_, n = parts = SumOverRanks.apply(torch.cat([x.sum(others), count])).split([x.shape[1], 1])
        mean = parts[0] / n
        centred = x - mean.view(shape)
        variance = SumOverRanks.apply(centred.square().sum(others)) / n
        self._update_running(mean.detach(), (variance * (n / (n - 1))).detach())
        out = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked or 1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _ThenActivation:
    """The dropout and activation that timm's BatchNormAct2d applies after the norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))  # type: ignore[attr-defined, misc, no-any-return]


class SyncNormAct(_ThenActivation, nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm, then the activation."""


class AnyDeviceSyncNormAct(_ThenActivation, AnyDeviceSyncBatchNorm):
    """AnyDeviceSyncBatchNorm, then the activation."""


def is_synchronised(norm: nn.Module) -> bool:
    """True if a batch norm computes its statistics over all ranks."""
    return isinstance(norm, nn.SyncBatchNorm | AnyDeviceSyncBatchNorm)


def synchronised(norm: nn.Module, by_torch: bool) -> nn.Module | None:
    """Return a batch norm as a synchronised one; None if its class is not known.

    It keeps a subclass's additions, which torch's convert_sync_batchnorm loses.
    """
    if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        made = taken_over(norm, nn.SyncBatchNorm if by_torch else AnyDeviceSyncBatchNorm)
    elif type(norm).__name__ == "BatchNormAct2d" and hasattr(norm, "drop") and hasattr(norm, "act"):
        made = taken_over(norm, SyncNormAct if by_torch else AnyDeviceSyncNormAct)
    else:
        return norm if isinstance(norm, nn.SyncBatchNorm) else None
    made.process_group = None  # type: ignore[assignment]  # None means all ranks
    return made
