"""Works around torch's wrong bfloat16 weight gradients on CPUs, for strided convolutions over a single pixel."""

from __future__ import annotations

from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.modules import run_once
from drivetrain.core.trees import Tree


def without_strides(model: torch.nn.Module, example: Tree) -> list[str]:
    """Set the stride to 1 in convolutions over a single pixel: the output is the same, and the kernel is correct.

    oneDNN reads uninitialised memory there, so that gradients are sometimes NaN (seen with torch 2.15). Returns lines to
    log. `example` is a batch as the model gets it.
    """
    strided = {m: n for n, m in model.named_modules() if isinstance(m, torch.nn.modules.conv._ConvNd) and max(m.stride) > 1}
    if not strided:
        return []
    new_strides: dict[Any, tuple[int, ...]] = {}

    def inspect(module: Any, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(module.padding, str):
            sizes = zip(args[0].shape[2:], module.stride, module.padding, module.dilation, module.kernel_size, strict=True)
            strides = tuple(1 if n == 1 and 2 * pad == dilation * (k - 1) else stride for n, stride, pad, dilation, k in sizes)
            if strides != module.stride:
                new_strides[module] = strides

    run_once(model, example, [module.register_forward_hook(inspect) for module in strided])
    for module, strides in new_strides.items():
        module.stride = strides
    names = ", ".join(strided[module] for module in new_strides)
    return [f"bfloat16 on a CPU: stride 1 for {names}, where a pixel is all there is"] if new_strides else []
