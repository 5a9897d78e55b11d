"""Keeps what autograd saves for the backward in the host's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from drivetrain.core.torch_patches import wrap_forward

Packed = torch.Tensor | tuple[torch.device, torch.Tensor]


def offload_forward(model: torch.nn.Module, min_bytes: int) -> None:
    """Wrap the model's forward, in place: what it saves goes to the host as soon as it is saved, and comes back when asked for.

    torch's own save_on_cpu copies the weights too, and waits for each copy. Here the copies are queued on the stream that
    computes: the device's memory is used again only after them, and pinned memory is kept until its copies are over.
    """

    def pack(tensor: torch.Tensor) -> Packed:
        if is_weight(tensor) or tensor.nbytes < min_bytes or tensor.layout != torch.strided:
            return tensor
        pinned = tensor.device.type == "cuda"
        # With its strides: kernels of the backward may differ by them.
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        return tensor.device, host.copy_(tensor, non_blocking=pinned)

    def unpack(packed: Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    def wrapped(forward: Callable[..., object]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def offloaded(*args: object, **kwargs: object) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return offloaded

    wrap_forward(model, wrapped)


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a parameter, or autocast's copy of one, or a view of either."""
    whole: Any = tensor if tensor._base is None else tensor._base
    if whole.grad_fn is not None and whole.grad_fn.name() == "ToCopyBackward0":
        whole = getattr(whole.grad_fn.next_functions[0][0], "variable", None)  # of which it is a copy, if that was no result
    return isinstance(whole, torch.nn.Parameter)
