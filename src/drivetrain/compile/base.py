"""Compiling: TorchScript, and torch.compile of the model, of its repeated blocks, or of the whole step as one graph."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import start_autograd_engine, torch
from drivetrain.core.machine.paths import user_cache
from drivetrain.core.machine.torch_patches import wrap_forward
from drivetrain.core.options import groups
from drivetrain.core.options.allowed import Name
from drivetrain.core.options.option import BuildContext, Count, Effect, Option, RunSpec
from drivetrain.core.step import streams
from drivetrain.core.step.blocks import blocks_for, describe_blocks
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.modules import buffers_kept
from drivetrain.core.step.step import Step, WrappingStep
from drivetrain.core.step.trees import Tree

logger = logging.getLogger(__name__)


class Compile(Option, groups.Compile):
    """compile=none: the model runs eagerly."""

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"
    warmup = 1  # steps until compilation is done

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> torch.nn.Module:
        """Return the callable that training calls.

        `example` is what training calls the model with for two samples; `budget` is the share of activations to
        keep.
        """
        return model

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        """Return the step, or one that runs it as a single graph."""
        return step

    def seconds(self) -> float | None:
        """Return the seconds spent compiling so far, or None."""
        return None

    def settle(self) -> None:
        """Run the pending updates, so that weights and sums include the last update."""

    def waits(self) -> bool:
        """Return whether the last update is still pending."""
        return False

    def checked(self, step: Step) -> Step:
        """Return the loop's step. Raises UserError if a wrapper needs something that the option's own step does not do."""
        return step

    def cannot(self, error: BaseException) -> str:
        """Return the unsupported request behind this error, with the setting to change; else ""."""
        return ""

    def advice(self, error: BaseException) -> str:
        """Return the setting to change if this error is the compiler's own, else ""."""
        return ""


class Compiled(Compile):
    """The base of all options that compile."""

    active = True
    needs_real_tensors = "compilers generate and run code for a device"
    specializes_on_shapes = True
    ranks_meet_in_forward = True
    whole_forward = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.debug.names_backward_lines:
            yield (
                f"{run.named('compile')} and {run.named('debug')} exclude each other (a compiled backward has no lines to name): "
                "set compile=none"
            )


def compiled_anew() -> bool:
    """Return whether torch.compile has made kernels in this process that were not in its cache."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_miss"] > 0


def dynamo_seconds() -> float:
    """Return the seconds that this process has spent in torch.compile, forward and backward graphs together."""
    from torch._dynamo.utils import calculate_time_spent

    return float(calculate_time_spent().get("total_wall_time", 0.0))


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

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> torch.nn.Module:
        start = time.perf_counter()
        try:
            with warnings.catch_warnings(), buffers_kept(model):  # `advise` has already warned of its retirement
                warnings.simplefilter("ignore")
                jitted = torch.jit.script(model) if self.method == "script" else self._trace(model, example)
        except Exception as error:
            other = "trace" if self.method == "script" else "script"
            line = next(iter(str(error).strip().splitlines()), "")
            raise UserError(
                f"compile=jit cannot {self.method} this model ({type(error).__name__}: {line}): "
                f"set compile.method={other} or compile=inductor"
            ) from None
        self._seconds = time.perf_counter() - start
        return jitted

    def _trace(self, model: torch.nn.Module, example: Tree) -> torch.nn.Module:
        with streams.apart():
            inputs = {"example_kwarg_inputs": example} if isinstance(example, dict) else {"example_inputs": example}
            traced: torch.nn.Module = torch.jit.trace(model, **inputs, check_trace=False)
        return traced

    def seconds(self) -> float | None:
        return self._seconds


F = TypeVar("F", bound=Callable[..., object])


_LINKING_S = 5.0  # a linker may still be writing a newer file


def drop_broken(folder: Path) -> list[Path]:
    """Delete the shared objects under `folder` that a killed linker left incomplete: the compiler would load them."""
    broken = [file for file in folder.rglob("*.so") if time.time() - file.stat().st_mtime > _LINKING_S and not _is_complete(file)]
    for file in broken:
        file.unlink(missing_ok=True)
    return broken


def _is_complete(file: Path) -> bool:
    """Return whether a 64-bit ELF file contains its section table, which linkers write last. Other formats pass."""
    with file.open("rb") as opened:
        header = opened.read(64)
    if len(header) < 64 or not any(header):
        return False
    if header[:5] != b"\x7fELF\x02":
        return True
    (table,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    return bool(file.stat().st_size >= table + size * count > 0)


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # on CUDA they capture compiled code as CUDA graphs
_USERS_CACHE = os.environ.get(CACHE_VARIABLE)


class Dynamo(Compiled):
    """The base of options that use torch.compile's inductor. `cache_dir` keeps compiled kernels between runs.

    null means TORCHINDUCTOR_CACHE_DIR if that is set, else drivetrain/inductor in the user's cache folder: torch's own
    default is in the temporary folder, which is deleted.
    """

    machine_local_keys = ("cache_dir",)
    cache_dir: str | None

    def setup(self, context: BuildContext) -> None:
        self._on_exit = context.on_exit

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
            yield f"{run.named('compile')} needs a C++ compiler (g++ or clang++) on the PATH: install one or set compile=none"

    def cannot(self, error: BaseException) -> str:
        if "double backward" not in str(error):
            return ""
        return "cannot differentiate a gradient of the model, as the loss does: set compile=step or compile=none"

    def advice(self, error: BaseException) -> str:
        if isinstance(error, AssertionError) and "Error in op: torch.ops.aten.convolution_backward" in str(error):
            return (
                " (torch's compiler expected another memory layout of a convolution's gradient than the device gave, as for "
                "maps of one pixel: pytorch #171622): set surgery=[channels_last], or compile=none"
            )
        if type(error).__name__ not in ("InductorError", "BackendCompilerFailed"):
            return ""
        fixed_shapes = "" if self.dynamic is False else "compile.dynamic=false, which gives it fixed shapes, or "
        return f": torch's compiler has no code for this model: set {fixed_shapes}compile=none"

    def prepare(self, budget: float) -> None:
        """Reset the compiler: it does not recompile on its own for another run's settings. Sets cache and memory budget."""
        start_autograd_engine()
        import torch._dynamo
        import torch._functorch.config

        cache = user_cache()
        if folder := self.cache_dir or _USERS_CACHE or (str(cache / "inductor") if cache is not None else ""):  # else torch's own
            os.environ[CACHE_VARIABLE] = folder
            drop_broken(Path(folder))
        torch.compiler.reset()
        # `precision` has decided whether float32 products may be rounded.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        self._on_exit.enter_context(torch._functorch.config.patch(activation_memory_budget=budget))
        self._seconds_before = dynamo_seconds()

    def seconds(self) -> float | None:
        return dynamo_seconds() - self._seconds_before


class Inductor(Dynamo):
    """Compiles the model with torch.compile: fused kernels, for a compilation time that `compile_s` reports."""

    effect = "close"
    changes = "fused kernels round otherwise"
    partitions_activations = True
    graphs = "compile.mode={mode}"  # for messages: the setting that enables CUDA graphs
    without_graphs = "compile.mode=default"  # and one without them

    def __init__(
        self,
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        self.mode, self.dynamic, self.fullgraph, self.cache_dir = mode, dynamic, fullgraph, cache_dir
        if mode in GRAPH_MODES:
            self.cuda_graphs, self.ranks_meet_in_forward, self.crosses_devices = True, False, False

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.mode in GRAPH_MODES and run.parallel.ranks() > 1 and keeps_gradients(run):
            kept = run.named("batch") if run.batch.accumulation_steps != 1 else "runtime.zero_grad=memset"
            yield (
                f"{self.graphs.format(mode=self.mode)}, {kept} and {run.named('parallel')} exclude each other (a CUDA graph's "
                "next replay overwrites gradients, and ranks reduce them in memory of their own, so that no copy can be kept): "
                f"set {self.without_graphs}"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        kind = run.runtime.device_type()
        if self.mode == "reduce-overhead" and kind != "cuda":
            yield f"compile.mode=reduce-overhead is CUDA graphs, and the device is of type {kind}: set compile.mode=default"

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> torch.nn.Module:
        self.prepare(budget)
        return self._compile(model)

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        return keep_gradients(step, context) if self.mode in GRAPH_MODES else step

    def _compile(self, target: F) -> F:
        compiled = torch.compile(target, mode=self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph)
        return compiled  # type: ignore[return-value]  # a module of a module, of a function a function


class Regional(Inductor):
    """Compiles only the repeated blocks: equal blocks share one compilation, so it takes a fraction of the time.

    `block` is the class name of the blocks; null means the blocks that the model repeats.
    """

    effect = "close"
    changes = "fused kernels round otherwise"
    whole_forward = False

    def __init__(
        self,
        block: Name | None = None,
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
        dynamic: bool | None = None,
        fullgraph: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(mode, dynamic, fullgraph, cache_dir)
        self.block = block

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> torch.nn.Module:
        self.prepare(budget)
        blocks = blocks_for("compile=regional", "compile.block", model, self.block)
        self._blocks = [b for b in blocks if not any(p.is_meta for p in b.parameters())]  # meta blocks belong to other ranks
        import torch._dynamo

        # Blocks of one class share one code object: each that differs in a shape or a number needs a recompilation of it.
        limit = max(torch._dynamo.config.recompile_limit, 2 * len(self._blocks))
        self._on_exit.enter_context(torch._dynamo.config.patch(recompile_limit=limit))
        for block in self._blocks:
            wrap_forward(block, self._compiled_if_grad)
        logger.info("%s compiled", describe_blocks(self._blocks))
        return model

    def _compiled_if_grad(self, plain: Callable[..., object]) -> Callable[..., object]:
        """Return a forward that runs compiled only with gradients enabled, because evaluation would recompile it."""
        compiled = self._compile(plain)

        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            return (compiled if torch.is_grad_enabled() else plain)(*args, **kwargs)

        return forward


def keeps_gradients(run: RunSpec) -> bool:
    """True if gradients must outlive a backward: to be added up, or to be kept and set to zero."""
    return bool(run.batch.accumulation_steps != 1 or run.runtime.zero_grad == "memset")


def keep_gradients(step: Step, context: BuildContext) -> Step:
    """Return the step, wrapped if its gradients have to outlive the next replay of a CUDA graph."""
    if not keeps_gradients(context.run) or context.device.type != "cuda":
        return step
    return KeptGradients(step, [p for p in context.model.parameters() if p.requires_grad])


@dataclass(eq=False)
class KeptGradients(WrappingStep):
    """Copies each gradient out of a CUDA graph's memory, which the graph's next replay overwrites (pytorch #169545).

    An update's first backward gives a parameter the graph's own tensor for its gradient; further backwards add to it in place. So
    a gradient is copied once an update, or once a run where `zero_grad` keeps it and writes zeros.
    """

    parameters: Sequence[torch.nn.Parameter]
    _kept: dict[int, torch.Tensor] = field(default_factory=dict, init=False)  # by a parameter's id

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.inner.micro_batch(batch, loss_sum)
        new = [(p, p.grad) for p in self.parameters if p.grad is not None and p.grad is not self._kept.get(id(p))]
        if not new:
            return
        for p, gradient in new:
            p.grad = self._kept.setdefault(id(p), torch.empty_like(gradient))
        torch._foreach_copy_([self._kept[id(p)] for p, _ in new], [gradient for _, gradient in new])


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

    If a step cannot be recorded, the run logs the reason and continues with compile=inductor. Python code in the forward runs
    only while recording; its decisions hold for the whole run.
    """

    effect = "close"
    changes = "fused kernels round otherwise"
    captures_step = True
    crosses_devices = False
    ranks_meet_in_forward = False  # the step's own all-reduce is the only part of a recording that concerns other ranks
    warmup = 4  # one eager and one recorded step; on CUDA also the first call for all updates of a replay, and its capture

    def __init__(self, cudagraph: bool = True, updates_per_replay: Count = 1, cache_dir: str | None = None) -> None:
        self.cudagraph, self.updates_per_replay, self.cache_dir = cudagraph, updates_per_replay, cache_dir
        self.warmup = 2 + 2 * updates_per_replay

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
            yield f"{key}={given} has no effect in compile=step, which makes its own update: set it to {neutral}"
        wanting = {
            "compile.cudagraph=false replays nothing": not self.cudagraph,
            f"{run.named('loader')} brings each batch by itself (loader=resident has them on the device)": (
                not run.loader.holds_samples and not run.data.on_device
            ),
            f"{run.named('precision')} decides at each update whether it is made": run.precision.scales_loss,
            f"{run.named('ema')} averages the weights of each update": run.ema.active,
            "phases take turns at each update": bool(run.values["phases"]),
        }
        yield from (self._one_by_one(why) for why, is_so in wanting.items() if is_so and self.updates_per_replay > 1)

    def _one_by_one(self, why: str) -> str:
        return f"compile.updates_per_replay={self.updates_per_replay}: {why}: set it to 1"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate_device(run)
        if self.cudagraph and run.parallel.ranks() > 1 and run.runtime.device_type() == "cuda":
            yield (
                f"compile.cudagraph=true and {run.named('parallel')} exclude each other (replaying the ranks' all-reduces is not "
                "tested): set compile.cudagraph=false"
            )
        if self.updates_per_replay > 1 and (kind := run.runtime.device_type()) != "cuda":
            yield self._one_by_one(f"CUDA graphs are replayed, and the device is of type {kind}")

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> torch.nn.Module:
        self.prepare(budget)
        return model

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        from drivetrain.compile.whole_step import WholeStep

        model = context.model
        self._step = WholeStep(
            step, model, context.optimizer, lambda: context.model_call.taking_batches(torch.compile(model)), self.cudagraph,
            context.precision.update_state, context.parts, context.parallel, self.updates_per_replay,
        )  # fmt: skip
        return self._step

    def seconds(self) -> float | None:
        return self._step.seconds + (super().seconds() or 0.0)

    def settle(self) -> None:
        self._step.settle()

    def waits(self) -> bool:
        return self._step.waits()

    def checked(self, step: Step) -> Step:
        if self.updates_per_replay > 1 and step is not self._step:
            wants = f"{type(step).__name__} needs each update separately (a callback, debug, the loss or the model)"
            raise UserError(self._one_by_one(wants))
        return step


class CudaGraph(Inductor):
    """torch.compile with mode=reduce-overhead: fused kernels, captured as CUDA graphs, one for each shape. CUDA only.

    torch's backend "cudagraphs", which captures the eager kernels, is not used: it treats parameters as inputs, and copies
    all of them before each replay.
    """

    effect = "close"
    changes = "fused kernels round otherwise"
    graphs = "compile=cudagraph"
    without_graphs = "compile=inductor"

    def __init__(self, fullgraph: bool = False, cache_dir: str | None = None) -> None:
        super().__init__("reduce-overhead", False, fullgraph, cache_dir)

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.runtime.device == "cpu":
            yield _no_cuda("runtime.device=cpu")

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device != "cpu" and run.runtime.device_type() != "cuda":
            yield _no_cuda("torch finds no CUDA device here")


def _no_cuda(reason: str) -> str:
    return f"compile=cudagraph needs a CUDA device, and {reason}: set compile=inductor or compile=none"
