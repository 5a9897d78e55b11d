"""compile=jit: TorchScript."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from drivetrain.compile.base import Compiled
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.core.trees import Tree, first


class Jit(Compiled):
    """Compiles with TorchScript, torch's compiler before torch.compile: retired upstream, included for comparison."""

    effect = "close"
    changes = "fused kernels round otherwise"
    torchscript = True
    specializes_on_shapes = False
    ranks_meet_in_forward = False
    crosses_devices = False

    def __init__(self, method: Literal["trace", "script"] = "trace") -> None:
        self.method = method

    def advise(self, run: RunSpec) -> Iterator[str]:
        yield "compile=jit is TorchScript, which torch has retired: compile=inductor is its successor"

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> Any:
        start = time.perf_counter()
        buffers = [buffer.clone() for buffer in model.buffers()]
        try:
            with warnings.catch_warnings():  # `advise` has warned that it is retired
                warnings.simplefilter("ignore")
                jitted = torch.jit.script(model) if self.method == "script" else self._trace(model, example)
        except Exception as error:
            other = "trace" if self.method == "script" else "script"
            line = next(iter(str(error).strip().splitlines()), "")
            raise UserError(
                f"compile=jit cannot {self.method} this model ({type(error).__name__}: {line}): "
                f"set compile.method={other} or compile=inductor"
            ) from None
        for buffer, before in zip(model.buffers(), buffers, strict=True):  # tracing updates running statistics
            buffer.copy_(before)
        self._seconds = time.perf_counter() - start
        return jitted

    def _trace(self, model: torch.nn.Module, example: Tree) -> Any:
        device = first(example).device  # the only one that is used: by default torch would start all of them
        with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
            inputs = {"example_kwarg_inputs": example} if isinstance(example, dict) else {"example_inputs": example}
            return torch.jit.trace(model, **inputs, check_trace=False)

    def seconds(self) -> float | None:
        return self._seconds
