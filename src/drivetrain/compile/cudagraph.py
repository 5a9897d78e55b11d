"""compile=cudagraph: replays the kernels of the forward, and those of the backward, by a single launch each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drivetrain.compile.inductor import Dynamo, keep_gradients, refuse_ranks_that_keep_gradients
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec
from drivetrain.core.step import Step
from drivetrain.core.trees import Tree

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class CudaGraph(Dynamo):
    """torch.compile with mode=reduce-overhead: fused kernels, captured as CUDA graphs, one for each shape. CUDA only.

    torch's backend "cudagraphs", which captures the eager kernels, is not used: it takes the parameters for inputs, and
    copies all of them before each replay.
    """

    effect = "close"
    changes = "fused kernels round otherwise"
    cuda_graphs = True
    partitions_activations = True
    ranks_meet_in_forward = False
    crosses_devices = False

    def __init__(self, fullgraph: bool = False, cache_dir: str | None = None) -> None:
        self.fullgraph, self.cache_dir = fullgraph, cache_dir

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.runtime.device == "cpu":
            yield _no_cuda("runtime.device=cpu")
        yield from refuse_ranks_that_keep_gradients(run, "compile=cudagraph", "set compile=inductor")

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device != "cpu" and run.runtime.device_type() != "cuda":
            yield _no_cuda("torch finds no CUDA device here")

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> Any:
        self.prepare(budget)
        return torch.compile(model, mode="reduce-overhead", dynamic=False, fullgraph=self.fullgraph)

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        return keep_gradients(step, context)


def _no_cuda(reason: str) -> str:
    return f"compile=cudagraph needs a CUDA device, and {reason}: set compile=inductor or compile=none"
