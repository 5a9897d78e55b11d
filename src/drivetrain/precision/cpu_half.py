"""Measures whether a CPU computes layers in a 16-bit format at a useful speed.

torch says which CPUs support float16 and bfloat16, and cannot be relied on: where the forward is supported, the backward may
fall back to a reference kernel that takes 50 times as long as float32. A CPU without bfloat16 takes about 10 times as long.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from drivetrain.core.lazy import torch
from drivetrain.core.machine import isolation
from drivetrain.core.machine.home import measured_once
from drivetrain.core.step import streams
from drivetrain.core.step.modules import run_once
from drivetrain.core.step.trees import Tree
from drivetrain.run.environment import processor

if TYPE_CHECKING:
    from torch.nn.modules.conv import _ConvNd

LIMIT = 2.0  # times as long as in float32: layers that take longer stay in float32
MIN_WORK = 1 << 21  # multiplications of a measured layer, so that they take most of its time: small batches are enlarged
ENOUGH_S = 0.02  # of measuring a layer in one format


class Slowness(NamedTuple):
    """The factors by which a model's layers take longer in a 16-bit format than in float32."""

    convolutions: float
    matrices: float


class LayerCall(NamedTuple):
    """A layer of a model, and the input that it gets."""

    layer: torch.nn.Linear | _ConvNd
    x: torch.Tensor

    def work(self) -> int:
        """The multiplications, up to a convolution's stride, which is the same for all batch sizes."""
        positions = self.x.numel() // (self.x.shape[1] if _is_convolution(self.layer) else self.x.shape[-1])
        return self.layer.weight.numel() * positions

    def seconds(self, dtype: torch.dtype) -> float:
        """The processor time of forward and backward, the shortest of some."""
        times = [self._once(dtype)]  # it may prepare the kernels
        while len(times) == 1 or sum(times) < ENOUGH_S:
            times.append(self._once(dtype))
        return min(times)

    def _once(self, dtype: torch.dtype) -> float:
        leaves = [self.x, *(p for p in self.layer.parameters() if p.requires_grad)]
        began = time.thread_time()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            output = self.layer(self.x)
        torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
        return time.thread_time() - began

    def enlarged(self) -> LayerCall:
        """The same call with a batch that is large enough to be measured. The numbers make no difference to the time."""
        shape = (self.x.shape[0] * max(1, MIN_WORK // max(1, self.work())), *self.x.shape[1:])
        x = torch.ones(shape)
        if x.dim() == 4 and not self.x.is_contiguous():
            x = x.contiguous(memory_format=torch.channels_last)
        return LayerCall(self.layer, x.requires_grad_())


_measured: dict[tuple[object, ...], float] = {}  # in this process


def measure(model: torch.nn.Module, example: Tree, dtype: torch.dtype) -> Slowness:
    """Measure the largest convolution and the largest Linear layer of the model's forward on `example`, which is on the CPU.

    `dtype` is float16 or bfloat16.
    """
    with isolation.threads(1), streams.apart():
        calls = _calls(model, example)
        products = [call for call in calls if not _is_convolution(call.layer)]
        # Of a model that has no Linear layer the products may be hidden in other operations.
        matrices = _slowness(products or [LayerCall(torch.nn.Linear(256, 256), torch.ones(256, 256))], dtype)
        convolutions = [call for call in calls if _is_convolution(call.layer)]
        return Slowness(_slowness(convolutions, dtype) if convolutions else matrices, matrices)


def _slowness(calls: list[LayerCall], dtype: torch.dtype) -> float:
    """The factor by which the largest of these calls takes longer in `dtype`.

    It is measured once for all runs on this machine: near the limit another look could answer otherwise, and a run that goes on
    would then not have the results of the unbroken one.
    """
    call = max(calls, key=LayerCall.work).enlarged()
    layer = repr(call.layer), tuple(call.x.shape), call.x.is_contiguous(), str(dtype)
    if layer not in _measured:
        what = ("slowness in 16 bits", *layer, processor(), torch.__version__)
        _measured[layer] = measured_once(what, lambda: call.seconds(dtype) / call.seconds(torch.float32))
    return _measured[layer]


def _calls(model: torch.nn.Module, example: Tree) -> list[LayerCall]:
    """The calls of convolutions and Linear layers in one forward."""
    calls: list[LayerCall] = []

    def add(layer: torch.nn.Linear | _ConvNd, args: tuple[torch.Tensor, ...]) -> None:
        if args and args[0].dim() >= layer.weight.dim():  # else it has no batch dimension
            calls.append(LayerCall(layer, args[0]))

    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) or _is_convolution(m)]
    run_once(model, example, [layer.register_forward_pre_hook(add) for layer in layers])
    return calls


def _is_convolution(layer: torch.nn.Module) -> TypeGuard[_ConvNd]:
    return isinstance(layer, torch.nn.modules.conv._ConvNd)


def without_strides(model: torch.nn.Module, example: Tree) -> list[str]:
    """Set the stride to 1 in convolutions over a single pixel: the output is the same, and the kernel is correct.

    oneDNN reads uninitialised memory there, so that gradients are sometimes NaN (seen with torch 2.15). Returns lines to
    log. `example` is a batch as the model gets it.
    """
    strided = {m: n for n, m in model.named_modules() if _is_convolution(m) and max(m.stride) > 1}
    if not strided:
        return []
    new_strides: dict[_ConvNd, tuple[int, ...]] = {}

    def inspect(module: _ConvNd, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
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
