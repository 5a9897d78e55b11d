"""CUDA's autocast for a step that is recorded on fake tensors of the CPU: it keeps more operations in float32 than the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# Of torch's list "CUDA Ops that can autocast to float32": those that the CPU's autocast computes in 16 bits.
IN_FLOAT32: frozenset[Callable[..., Any]] = frozenset((
    functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax, functional.cross_entropy,
    functional.nll_loss, functional.softplus, functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss,
    functional.kl_div, functional.cosine_similarity, functional.normalize, torch.softmax, torch.log_softmax, torch.exp, torch.log,
    torch.pow, torch.sum, torch.prod, torch.cumsum, torch.norm, torch.rsqrt, torch.Tensor.softmax, torch.Tensor.log_softmax,
    torch.Tensor.exp, torch.Tensor.log, torch.Tensor.pow, torch.Tensor.sum, torch.Tensor.prod, torch.Tensor.cumsum,
    torch.Tensor.norm, torch.Tensor.rsqrt,
))  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Gives these operations their inputs in float32 while autocast is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def autocast_of(device_type: str) -> AbstractContextManager[Any]:
    """The context in which autocast does what it does on this type of device."""
    return nullcontext() if device_type == "cpu" else CudaAutocast()
