"""compile=cudagraph: launches all kernels of the model at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drivetrain.compile.base import Compiled, dynamo_seconds
from drivetrain.compile.inductor import graphs_keep_gradients
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec


class CudaGraph(Compiled):
    """Uses torch.compile's cudagraphs backend: the model's eager kernels, launched all at once. CUDA only."""

    cuda_graphs = True
    ranks_meet_in_forward = False
    crosses_devices = False

    def __init__(self, fullgraph: bool = False) -> None:
        self.fullgraph = fullgraph

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.runtime.device == "cpu":
            yield _no_cuda("runtime.device=cpu")
        yield from graphs_keep_gradients(run, "compile=cudagraph", "set compile=step")

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device != "cpu" and run.runtime.device_type() != "cuda":
            yield _no_cuda("torch finds no CUDA device here")

    def apply(self, model: torch.nn.Module, example: torch.Tensor, budget: float) -> Any:
        torch.compiler.reset()
        self._seconds_before = dynamo_seconds()
        return torch.compile(model, backend="cudagraphs", dynamic=False, fullgraph=self.fullgraph)

    def seconds(self) -> float | None:
        return dynamo_seconds() - self._seconds_before


def _no_cuda(reason: str) -> str:
    return f"compile=cudagraph needs a CUDA device, and {reason}: set compile=inductor or compile=none"
