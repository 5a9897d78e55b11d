"""Measures whether a CPU computes matrix products in a 16-bit format at a useful speed; convolutions stay in float32 there.

torch's own report on a CPU's support of float16 and bfloat16 is unreliable: with a supported forward, the backward may fall
back to a reference kernel that takes 50 times as long as float32. A CPU without bfloat16 takes about 10 times as long.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from drivetrain.core.lazy import torch
from drivetrain.core.machine import isolation
from drivetrain.core.machine.home import measured_once
from drivetrain.core.step import streams
from drivetrain.core.step.modules import run_once
from drivetrain.core.step.trees import Tree
from drivetrain.run.environment import processor

LIMIT = 2.0  # times as long as in float32: layers that take longer stay in float32
MIN_WORK = 1 << 21  # multiplications of a measured layer, so that they take most of its time: small batches are enlarged
ENOUGH_S = 0.02  # seconds for measuring a layer in one format


class LayerCall(NamedTuple):
    """A Linear layer of a model, and its input."""

    layer: torch.nn.Linear
    x: torch.Tensor

    def work(self) -> int:
        """The multiplications."""
        return self.layer.weight.numel() * self.x.numel() // self.x.shape[-1]

    def seconds(self, dtype: torch.dtype) -> float:
        """The shortest of several processor times of forward and backward."""
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
        """The same call with a batch large enough for a measurement. The values do not affect the time."""
        shape = (self.x.shape[0] * max(1, MIN_WORK // max(1, self.work())), *self.x.shape[1:])
        return LayerCall(self.layer, torch.ones(shape, requires_grad=True))


_measured: dict[tuple[object, ...], float] = {}  # in this process


def measure(model: torch.nn.Module, example: Tree, dtype: torch.dtype) -> float:
    """Return how many times as long the model's largest Linear layer takes in `dtype`, float16 or bfloat16, as in float32.

    `example` is on the CPU.
    """
    with isolation.threads(1), streams.apart():
        # In a model without a Linear layer, products may be hidden in other operations.
        return _slowness(_calls(model, example) or [LayerCall(torch.nn.Linear(256, 256), torch.ones(256, 256))], dtype)


def _slowness(calls: list[LayerCall], dtype: torch.dtype) -> float:
    """The factor by which the largest of these calls takes longer in `dtype`.

    It is measured once for all runs on this machine: near the limit another measurement could decide differently, and a resumed
    run would not equal the uninterrupted one.
    """
    call = max(calls, key=LayerCall.work).enlarged()
    layer = repr(call.layer), tuple(call.x.shape), call.x.is_contiguous(), str(dtype)
    if layer not in _measured:
        what = ("slowness in 16 bits", *layer, processor(), torch.__version__)
        _measured[layer] = measured_once(what, lambda: call.seconds(dtype) / call.seconds(torch.float32))
    return _measured[layer]


def _calls(model: torch.nn.Module, example: Tree) -> list[LayerCall]:
    """The calls of Linear layers in one forward."""
    calls: list[LayerCall] = []

    def add(layer: torch.nn.Linear, args: tuple[torch.Tensor, ...]) -> None:
        if args and args[0].dim() >= layer.weight.dim():  # else it has no batch dimension
            calls.append(LayerCall(layer, args[0]))

    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    run_once(model, example, [layer.register_forward_pre_hook(add) for layer in layers])
    return calls
