"""compile=inductor and compile=regional: torch.compile of the model, or of its repeated blocks."""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from drivetrain.compile import kernel_cache
from drivetrain.compile.base import Compiled, dynamo_seconds
from drivetrain.core.blocks import blocks_for, describe_blocks
from drivetrain.core.lazy import torch
from drivetrain.core.option import RunSpec

logger = logging.getLogger(__name__)
CACHE = "TORCHINDUCTOR_CACHE_DIR"
_USERS_CACHE = os.environ.get(CACHE)
_GRAPH_MEMORY = "CUDA graphs reuse the memory that gradients lie in"


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
        self._before = dynamo_seconds()

    def seconds(self) -> float | None:
        return dynamo_seconds() - self._before


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
            yield from graphs_keep_gradients(run, f"compile.mode={self.mode}", "set compile.mode=default, or compile=step")

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if self.mode == "reduce-overhead" and run.runtime.device_type() != "cuda":
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


def _in_training(compiled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled forward where gradients are wanted, else the plain one: evaluation would compile everything again."""

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else plain)(*args, **kwargs)

    return forward


def graphs_keep_gradients(run: RunSpec, setting: str, remedy: str) -> Iterator[str]:
    """A backward inside CUDA graphs leaves the gradients in memory that its next replay overwrites (pytorch #169545)."""
    if run.batch.accumulation_steps != 1:
        yield f"{setting} and {run.named('batch')} exclude each other ({_GRAPH_MEMORY}, so they cannot be added up): {remedy}"
    if run.runtime.zero_grad == "memset":
        yield f"{setting} and runtime.zero_grad=memset exclude each other ({_GRAPH_MEMORY}): set runtime.zero_grad=none"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
