"""Compiling the model, or the whole step. Evaluation and saving always keep the plain model."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.compile import kernel_cache
from drivetrain.core.blocks import blocks_for, describe_blocks
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Option, RunSpec
from drivetrain.core.step import Step

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

logger = logging.getLogger(__name__)
CACHE = "TORCHINDUCTOR_CACHE_DIR"
_USERS_CACHE = os.environ.get(CACHE)
_GRAPH_MEMORY = "CUDA graphs reuse the memory that gradients lie in"


class Compile(Option):
    """compile=none: the model runs op by op."""

    active = False
    captures_step = False  # the whole step is one graph
    cuda_graphs = False
    torchscript = False
    partitions_activations = False  # splits a graph into forward and backward, and chooses what to keep between them
    specializes_on_shapes = False  # compiles anew, or slower code, where shapes change
    ranks_meet_in_forward = False  # collectives may stand in the compiled forward
    crosses_devices = True  # activations may move between devices within the forward
    whole_forward = False  # the model's forward is compiled as a whole, not block by block
    warmup = 1  # steps after which all of them are alike
    dynamic: bool | None = False  # whether code is made for shapes in general; None: where the compiler sees that they change

    def apply(self, model: torch.nn.Module, example: torch.Tensor, budget: float) -> Any:
        """The callable that training calls. `example` is a batch of two zeros; `budget` the share of activations to keep."""
        return model

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        """The step, or one graph in its place."""
        return step

    def seconds(self) -> float | None:
        """What compiling has taken so far."""
        return None

    def advice(self, error: BaseException) -> str:
        """What to set where this error is the compiler's own."""
        return ""


class Compiled(Compile):
    """What all that compile have in common."""

    active = True
    specializes_on_shapes = True
    ranks_meet_in_forward = True
    whole_forward = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.debug.names_backward_lines:
            yield (
                f"{run.named('compile')} and {run.named('debug')} exclude each other (a compiled backward has no lines to name): "
                "set compile=none"
            )


class Dynamo(Compiled):
    """What goes through torch.compile's inductor. `cache_dir` keeps compiled kernels between runs.

    null is TORCHINDUCTOR_CACHE_DIR if that is set, else drivetrain/inductor in the user's cache folder: torch's own
    default lies in the temporary folder, which does not last.
    """

    machine_local_keys = ("cache_dir",)
    cache_dir: str | None

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
            yield f"{run.named('compile')} needs a C++ compiler (g++ or clang++) on the PATH: install one or set compile=none"

    def advice(self, error: BaseException) -> str:
        if type(error).__name__ not in ("InductorError", "BackendCompilerFailed"):
            return ""
        fixed = "" if self.dynamic is False else "compile.dynamic=false, which gives it fixed shapes, or "
        return f": torch's compiler has no code for this model: set {fixed}compile=none"

    def prepare(self, budget: float) -> None:
        """Forget what this process compiled for another run, whose settings the compiler does not compare."""
        import torch._dynamo
        import torch._functorch.config

        os.environ[CACHE] = self.cache_dir or _USERS_CACHE or str(_user_cache() / "drivetrain" / "inductor")
        kernel_cache.drop_broken(Path(os.environ[CACHE]))
        torch.compiler.reset()
        torch._functorch.config.activation_memory_budget = budget
        self._before = _dynamo_seconds()

    def seconds(self) -> float | None:
        return _dynamo_seconds() - self._before


class Inductor(Dynamo):
    """torch.compile of the model: fused kernels, at the cost of a compilation that `compile_s` reports."""

    partitions_activations = True

    def __init__(
        self,
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        self.mode, self.dynamic, self.fullgraph, self.cache_dir = mode, dynamic, fullgraph, cache_dir

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.mode in ("reduce-overhead", "max-autotune"):
            yield from _graphs_keep_gradients(run, f"compile.mode={self.mode}", "set compile.mode=default, or compile=step")

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if self.mode == "reduce-overhead" and run.runtime.kind() != "cuda":
            yield "compile.mode=reduce-overhead is CUDA graphs, and the device is a CPU: set compile.mode=default"

    def apply(self, model: torch.nn.Module, example: torch.Tensor, budget: float) -> Any:
        self.prepare(budget)
        return self._compiled(model)

    def _compiled(self, what: Any) -> Any:
        return torch.compile(what, mode=self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph)


class Regional(Inductor):
    """torch.compile of the repeated blocks alone: equal blocks share one compilation, so it takes a fraction of the time.

    `block` names the block's class where the model's own repetition is not the one wanted.
    """

    whole_forward = False

    def __init__(
        self,
        block: str | None = None,
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(mode, dynamic, fullgraph, cache_dir)
        self.block = block

    def apply(self, model: torch.nn.Module, example: torch.Tensor, budget: float) -> Any:
        self.prepare(budget)
        blocks = blocks_for("compile=regional", "compile.block", model, self.block)
        self._blocks = [b for b in blocks if not any(p.is_meta for p in b.parameters())]  # others are another rank's
        import torch._dynamo

        # Blocks of one class are one piece of code: each that differs in a shape or a number takes one of its places.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(self._blocks))
        for block in self._blocks:
            block.forward = _in_training(self._compiled(block.forward), block.forward)  # type: ignore[method-assign]
        logger.info("%s compiled", describe_blocks(self._blocks))
        return model


class CudaGraph(Compiled):
    """torch.compile's cudagraphs backend: the model's kernels as they are, launched all at once. CUDA only."""

    cuda_graphs = True
    ranks_meet_in_forward = False
    crosses_devices = False

    def __init__(self, fullgraph: bool = False) -> None:
        self.fullgraph = fullgraph

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.runtime.device == "cpu":
            yield _no_cuda("runtime.device=cpu")
        yield from _graphs_keep_gradients(run, "compile=cudagraph", "set compile=step")

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device != "cpu" and run.runtime.kind() != "cuda":
            yield _no_cuda("torch finds no CUDA device here")

    def apply(self, model: torch.nn.Module, example: torch.Tensor, budget: float) -> Any:
        torch.compiler.reset()
        self._before = _dynamo_seconds()
        return torch.compile(model, backend="cudagraphs", dynamic=False, fullgraph=self.fullgraph)

    def seconds(self) -> float | None:
        return _dynamo_seconds() - self._before


def op_by_op(run: RunSpec) -> dict[str, tuple[str, str]]:
    """What a run sets of how its update is made op by op, and what leaves that open: key → (value, other value)."""
    fused, foreach = (getattr(run.optimizer, knob, None) for knob in ("fused", "foreach"))
    sets = {
        "optimizer.fused": (fused is True, "true", "null"), "optimizer.foreach": (foreach is False, "false", "null"),
        "runtime.zero_grad": (run.runtime.zero_grad == "memset", "memset", "none"),
    }  # fmt: skip
    return {key: (given, free) for key, (is_set, given, free) in sets.items() if is_set}


class StepGraph(Dynamo):
    """Forward, backward, clipping and update as one graph, learning rates as tensors; on CUDA one launch an update.

    Where a step cannot be recorded the run says why and goes on with compile=inductor. Python in the forward runs once,
    while recording: what it decides from then on holds for the run.
    """

    captures_step = True
    crosses_devices = False
    warmup = 4  # op by op, recorded, and on CUDA a first call and the capture

    def __init__(self, cudagraph: bool = True, cache_dir: str | None = None) -> None:
        self.cudagraph, self.cache_dir = cudagraph, cache_dir

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not run.parallel.one_process:
            yield (
                f"compile=step and {run.named('parallel')} exclude each other (gradients meet in hooks, which a graph of the "
                "whole step does not call): set compile=inductor or parallel=single"
            )
        if run.precision.scales_loss:
            yield (
                f"compile=step and {run.named('precision')} exclude each other (the loss scaler decides in Python whether to "
                "update): set precision=bf16 or compile=inductor"
            )
        for key, (given, free) in op_by_op(run).items():
            yield f"{key}={given} has no effect in compile=step, which makes the update in its own way: set it to {free}"

    def apply(self, model: torch.nn.Module, example: torch.Tensor, budget: float) -> Any:
        self.prepare(budget)
        return model

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        from drivetrain.compile.whole_step import WholeStep

        model = context.model
        self._step = WholeStep(step, model, context.optimizer, lambda: torch.compile(model), self.cudagraph)
        return self._step

    def seconds(self) -> float | None:
        return self._step.seconds + (super().seconds() or 0.0)


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


def _in_training(compiled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled forward where gradients are wanted, else the plain one: evaluation would compile everything again."""

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else plain)(*args, **kwargs)

    return forward


def _graphs_keep_gradients(run: RunSpec, setting: str, remedy: str) -> Iterator[str]:
    """A backward inside CUDA graphs leaves the gradients in memory that its next replay overwrites (pytorch #169545)."""
    if run.batch.accumulation_steps != 1:
        yield f"{setting} and {run.named('batch')} exclude each other ({_GRAPH_MEMORY}, so they cannot be added up): {remedy}"
    if run.runtime.zero_grad == "memset":
        yield f"{setting} and runtime.zero_grad=memset exclude each other ({_GRAPH_MEMORY}): set runtime.zero_grad=none"


def _no_cuda(because: str) -> str:
    return f"compile=cudagraph needs a CUDA device, and {because}: set compile=inductor or compile=none"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _dynamo_seconds() -> float:
    """Seconds that this process has spent in torch.compile, forward and backward graphs together."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))
