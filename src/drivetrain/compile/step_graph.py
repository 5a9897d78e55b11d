"""compile=step: compiles the whole step as one graph."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.compile.inductor import Dynamo, keep_gradients, refuse_ranks_that_keep_gradients
from drivetrain.core.lazy import torch
from drivetrain.core.option import BuildContext, RunSpec
from drivetrain.core.step import Step
from drivetrain.core.trees import Tree


def eager_only_settings(run: RunSpec) -> dict[str, tuple[str, str]]:
    """Return the run's settings that affect only eager updates: key → (its value, the neutral value)."""
    fused, foreach = (getattr(run.optimizer, setting, None) for setting in ("fused", "foreach"))
    settings = {
        "optimizer.fused": (fused is True, "true", "null"), "optimizer.foreach": (foreach is False, "false", "null"),
        "runtime.zero_grad": (run.runtime.zero_grad == "memset", "memset", "none"),
    }  # fmt: skip
    return {key: (given, neutral) for key, (is_set, given, neutral) in settings.items() if is_set}


class StepGraph(Dynamo):
    """Compiles forward, backward, clipping and update into one graph, with learning rates as tensors; one launch on CUDA.

    If a step cannot be recorded, the run logs the reason and continues with compile=inductor. Python code in the forward
    runs only while recording: its decisions then hold for the whole run.
    """

    effect = "close"
    changes = "fused kernels round otherwise"
    captures_step = True
    crosses_devices = False
    ranks_meet_in_forward = False  # what a recording holds of other ranks is the step's own all-reduce
    warmup = 4  # one eager, one recorded, and on CUDA a first call and the capture

    def __init__(self, cudagraph: bool = True, cache_dir: str | None = None) -> None:
        self.cudagraph, self.cache_dir = cudagraph, cache_dir

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not run.parallel.reduces_in_graph:
            yield (
                f"compile=step and {run.named('parallel')} exclude each other (its ranks exchange weights and gradients "
                "in hooks, which a graph of the whole step does not call): set compile=inductor, or parallel=ddp"
            )
        if run.loss.compares_samples and run.parallel.ranks() > 1:
            yield (
                f"compile=step and {run.named('loss')} exclude each other over several ranks (they exchange samples within the "
                "loss, which is not recorded): set compile=inductor"
            )
        if run.precision.frees_weights:
            yield (
                f"compile=step and {run.named('precision')} with precision.master=stochastic exclude each other (a graph's "
                "memory cannot be freed between updates): set precision.master=fp32 or compile=inductor"
            )
        for key, (given, neutral) in eager_only_settings(run).items():
            yield f"{key}={given} has no effect in compile=step, which makes the update in its own way: set it to {neutral}"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate_device(run)
        if self.cudagraph and run.parallel.ranks() > 1 and run.runtime.device_type() == "cuda":
            yield (
                f"compile.cudagraph=true and {run.named('parallel')} exclude each other (replaying the ranks' all-reduces is not "
                "tested): set compile.cudagraph=false"
            )

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> torch.nn.Module:
        self.prepare(budget)
        return model

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        from drivetrain.compile.whole_step import WholeStep

        model = context.model
        self._step = WholeStep(
            step, model, context.optimizer, lambda: context.model_call.taking_batches(torch.compile(model)), self.cudagraph,
            context.precision.update_state, context.parts, context.parallel,
        )  # fmt: skip
        return self._step

    def seconds(self) -> float | None:
        return self._step.seconds + (super().seconds() or 0.0)


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

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> torch.nn.Module:
        self.prepare(budget)
        compiled = torch.compile(model, mode="reduce-overhead", dynamic=False, fullgraph=self.fullgraph)
        return compiled  # type: ignore[return-value]  # a module of a module

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        return keep_gradients(step, context)


def _no_cuda(reason: str) -> str:
    return f"compile=cudagraph needs a CUDA device, and {reason}: set compile=inductor or compile=none"
