"""Base classes of the compile options."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from typing import ClassVar, Literal

from drivetrain.core import groups
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import BuildContext, Effect, Option, RunSpec
from drivetrain.core.step import Step
from drivetrain.core.trees import Tree, first


class Compile(Option, groups.Compile):
    """compile=none: the model runs eagerly."""

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"
    warmup = 1  # steps until compilation is done

    def apply(self, model: torch.nn.Module, example: Tree, budget: float) -> torch.nn.Module:
        """Return the callable that training calls.

        `example` is two samples of zeros, as `trees.call` calls the model with them; `budget` is the share of activations to
        keep.
        """
        return model

    def wrap_step(self, step: Step, context: BuildContext) -> Step:
        """Return the step, or one that runs it as a single graph."""
        return step

    def seconds(self) -> float | None:
        """Return the seconds spent compiling so far, or None."""
        return None

    def cannot(self, error: BaseException) -> str:
        """Return what the run asks of this option that it cannot do, with what to set, where this error says so; else ""."""
        return ""

    def advice(self, error: BaseException) -> str:
        """Return what to set if this error is the compiler's own, else an empty string."""
        return ""


class Compiled(Compile):
    """The base of all options that compile."""

    active = True
    needs_real_tensors = "compilers make code for a device, and run it"
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
    """Return whether torch.compile has made kernels in this process that it did not find in its cache."""
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

    def _trace(self, model: torch.nn.Module, example: Tree) -> torch.nn.Module:
        device = first(example).device  # the only one that is used: by default torch would start all of them
        with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
            inputs = {"example_kwarg_inputs": example} if isinstance(example, dict) else {"example_inputs": example}
            return torch.jit.trace(model, **inputs, check_trace=False)  # type: ignore[no-any-return, no-untyped-call]

    def seconds(self) -> float | None:
        return self._seconds
