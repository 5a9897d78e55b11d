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


class Jit(Compiled):
    """TorchScript, torch's compiler before torch.compile: retired upstream, here to compare with."""

    torchscript = True
    specializes_on_shapes = False
    ranks_meet_in_forward = False
    crosses_devices = False

    def __init__(self, method: Literal["trace", "script"] = "trace") -> None:
        self.method = method

    def advise(self, run: RunSpec) -> Iterator[str]:
        yield "compile=jit is TorchScript, which torch has retired: compile=inductor is its successor"

    def apply(self, model: torch.nn.Module, example: torch.Tensor, budget: float) -> Any:
        start = time.perf_counter()
        held = [buffer.clone() for buffer in model.buffers()]
        try:
            with warnings.catch_warnings():  # that it is retired we have said ourselves
                warnings.simplefilter("ignore")
                jitted = torch.jit.script(model) if self.method == "script" else self._traced(model, example)
        except Exception as error:
            other = "trace" if self.method == "script" else "script"
            line = next(iter(str(error).strip().splitlines()), "")
            raise UserError(
                f"compile=jit cannot {self.method} this model ({type(error).__name__}: {line}): "
                f"set compile.method={other} or compile=inductor"
            ) from None
        for buffer, before in zip(model.buffers(), held, strict=True):  # tracing runs the model: its statistics stay
            buffer.copy_(before)
        self._seconds = time.perf_counter() - start
        return jitted

    def _traced(self, model: torch.nn.Module, example: torch.Tensor) -> Any:
        with torch.random.fork_rng():
            return torch.jit.trace(model, example, check_trace=False)

    def seconds(self) -> float | None:
        return self._seconds
