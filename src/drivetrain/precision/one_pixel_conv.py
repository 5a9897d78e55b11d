"""Strided convolutions over a single pixel: torch's bfloat16 kernels for CPUs get the gradient of their weights wrong."""

from __future__ import annotations

from typing import Any

from drivetrain.core.lazy import torch


def without_strides(model: torch.nn.Module, example: torch.Tensor) -> list[str]:
    """Set the stride to 1 where it has nothing to stride over: the output is the same pixel, by a kernel that is right.

    oneDNN reads memory there that nobody wrote, so gradients are NaN now and then (seen with torch 2.15). Returns what to
    say of it. `example` is a batch as the model gets it.
    """
    strided = {m: n for n, m in model.named_modules() if isinstance(m, torch.nn.modules.conv._ConvNd) and max(m.stride) > 1}
    if not strided:
        return []
    found: dict[Any, tuple[int, ...]] = {}

    def look(module: Any, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(module.padding, str):
            sizes = zip(args[0].shape[2:], module.stride, module.padding, module.dilation, module.kernel_size, strict=True)
            strides = tuple(1 if n == 1 and 2 * pad == gap * (k - 1) else by for n, by, pad, gap, k in sizes)
            if strides != module.stride:
                found[module] = strides

    _forward(model, example, [module.register_forward_hook(look) for module in strided])
    for module, strides in found.items():
        module.stride = strides
    names = ", ".join(strided[module] for module in found)
    return [f"bfloat16 on a CPU: stride 1 for {names}, where a pixel is all there is"] if found else []


def _forward(model: torch.nn.Module, example: torch.Tensor, hooks: list[Any]) -> None:
    """One forward that changes nothing."""
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(example)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
