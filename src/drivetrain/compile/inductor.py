"""compile=inductor and compile=regional: torch.compile of the model, or of its repeated blocks."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from drivetrain.compile.base import Compiled, dynamo_seconds
from drivetrain.core.allowed import Name
from drivetrain.core.blocks import blocks_for, describe_blocks
from drivetrain.core.lazy import start_autograd_engine, torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.option import BuildContext, RunSpec
from drivetrain.core.paths import user_cache
from drivetrain.core.step import Step, WrappingStep
from drivetrain.core.torch_patches import wrap_forward
from drivetrain.core.trees import Tree

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., object])


_LINKING_S = 5.0  # a linker may still be writing a younger file


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
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # on CUDA they capture what they compile as CUDA graphs
_USERS_CACHE = os.environ.get(CACHE_VARIABLE)


class Dynamo(Compiled):
    """The base of options that use torch.compile's inductor. `cache_dir` keeps compiled kernels between runs.

    null means TORCHINDUCTOR_CACHE_DIR if that is set, else drivetrain/inductor in the user's cache folder: torch's own
    default is in the temporary folder, which is deleted.
    """

    machine_local_keys = ("cache_dir",)
    cache_dir: str | None

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
            yield f"{run.named('compile')} needs a C++ compiler (g++ or clang++) on the PATH: install one or set compile=none"

    def cannot(self, error: BaseException) -> str:
        if "double backward" not in str(error):
            return ""
        return "cannot differentiate a gradient of the model, as the loss does: set compile=step or compile=none"

    def advice(self, error: BaseException) -> str:
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
        # Whether float32 products may be rounded is said by `precision`, and was decided there.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        torch._functorch.config.activation_memory_budget = budget
        self._seconds_before = dynamo_seconds()

    def seconds(self) -> float | None:
        return dynamo_seconds() - self._seconds_before


class Inductor(Dynamo):
    """Compiles the model with torch.compile: fused kernels, for a compilation time that `compile_s` reports."""

    effect = "close"
    changes = "fused kernels round otherwise"
    partitions_activations = True

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
        if self.mode in GRAPH_MODES:
            yield from refuse_ranks_that_keep_gradients(run, f"compile.mode={self.mode}", "set compile.mode=default")

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
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(self._blocks))
        for block in self._blocks:
            wrap_forward(block, self._compiled_if_grad)
        logger.info("%s compiled", describe_blocks(self._blocks))
        return model

    def _compiled_if_grad(self, plain: Callable[..., object]) -> Callable[..., object]:
        """Return a forward that is compiled only where gradients are enabled, because evaluation would recompile it."""
        compiled = self._compile(plain)

        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            return (compiled if torch.is_grad_enabled() else plain)(*args, **kwargs)

        return forward


def keeps_gradients(run: RunSpec) -> bool:
    """True if gradients must outlive a backward: they are added up, or kept and set to zero."""
    return bool(run.batch.accumulation_steps != 1 or run.runtime.zero_grad == "memset")


def refuse_ranks_that_keep_gradients(run: RunSpec, setting: str, remedy: str) -> Iterator[str]:
    """Yield what excludes CUDA graphs: gradients are copied out of a graph's memory, but not where ranks hold them in buckets."""
    if run.parallel.ranks() > 1 and keeps_gradients(run):
        what = run.named("batch") if run.batch.accumulation_steps != 1 else "runtime.zero_grad=memset"
        yield (
            f"{setting}, {what} and {run.named('parallel')} exclude each other (a CUDA graph's next replay overwrites gradients, "
            f"and ranks reduce them in memory of their own): {remedy}"
        )


def keep_gradients(step: Step, context: BuildContext) -> Step:
    """Return a step whose gradients outlive the next replay of a CUDA graph, where they have to."""
    if not keeps_gradients(context.run) or context.device.type != "cuda":
        return step
    return KeptGradients(step, [p for p in context.model.parameters() if p.requires_grad])


@dataclass(eq=False)
class KeptGradients(WrappingStep):
    """Copies each gradient out of a CUDA graph's memory, which the graph's next replay overwrites (pytorch #169545).

    An update's first backward gives a parameter the graph's own tensor for its gradient; a further backward adds to what is
    there, in place. So a gradient is copied once an update, and once in a run where `zero_grad` keeps it and writes zeros.
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
