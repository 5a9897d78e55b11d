"""Forward, backward, clipping and update as one compiled graph; on CUDA replayed by a single launch.

The first update runs op by op: it makes the optimizer's state. The second runs op by op too, while every tensor
operation below autograd is recorded (make_fx on real tensors); parameters, buffers, optimizer state, gradients and
learning rates are the graph's inputs, written in place. Inductor then compiles the recording. What a recording cannot
hold (a value read back to Python, a count kept in Python) is noticed, and training goes on without it, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor
from torch.fx.experimental.proxy_tensor import make_fx

from drivetrain.plan import Micro
from drivetrain.step import Step

# Recomputed activations (activation checkpointing) stay where the backward wants them: sorting by locality moves them up.
INDUCTOR = {"reorder_for_locality": False}
# torch.optim's own switches for an update without Python numbers in it; the compiler fuses it.
TRACEABLE = {"fused": False, "foreach": True, "capturable": True}

Graph = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # inputs, targets, weight → loss


class CannotRecordError(Exception):
    """Why a step cannot be one graph."""


class WholeStep(Step):
    """A step that becomes one graph for each shape of a micro-batch.

    `otherwise` makes the forward to go on with where the step cannot be recorded; `say` tells the user why.
    """

    def __init__(
        self, step: Step, model: torch.nn.Module, otherwise: Callable[[], Any], say: Callable[[str], None], cudagraph: bool
    ) -> None:
        super().__init__(**vars(step))
        self.model, self._otherwise, self._say, self._cudagraph = model, otherwise, say, cudagraph
        self.seconds = 0.0  # recording and compiling
        self._op_by_op, self._begun = True, False
        self._updated = False  # the window's last micro-batch has updated already
        self._graphs: dict[tuple[Any, ...], Graph] = {}
        self._sums: list[torch.Tensor] = []  # gradients, where an update has several micro-batches

    def micro(self, micro: Micro) -> torch.Tensor:
        if self._op_by_op:
            return super().micro(micro)
        if micro.last:
            self._set_rates()
            if self._numbers() != self._recorded:
                self._give_up("a schedule moves a number of the optimizer other than its learning rate (momentum, weight decay)")
                return super().micro(micro)
        elif not self._sums:
            self._sum_gradients()
        key = (micro.last, bool(self._sums), *(f for t in (micro.x, micro.y) for f in (t.shape, t.dtype, t.stride())))
        graph = self._graphs.get(key)
        if graph is None:
            return self._record(key, micro)
        self._updated = micro.last
        return graph(micro.x, micro.y, micro.weight)

    def update(self) -> bool:
        if self._updated:
            self._updated = False
            return True
        trained = [p for p in self.model.parameters() if p.grad is not None]
        done = super().update()
        if done and not self._begun:
            self._begin(trained)
        return done

    def _begin(self, trained: list[torch.nn.Parameter]) -> None:
        """From here on by graphs: the optimizer has its state now, and we know which parameters get gradients."""
        self._trained, self._begun, self._op_by_op = trained, True, False
        device = trained[0].device
        self._rates_set = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._rates = [torch.tensor(lr, device=device) for lr in self._rates_set]
        self._recorded = self._numbers()
        for state in self.optimizer.state.values():  # counters that torch keeps on the CPU would not reach the graph
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    state[name] = value.to(device)

    def _sum_gradients(self) -> None:
        """Give the gradients buffers that stay: one graph adds to them, the last one reads and clears them."""
        for p in self._trained:
            p.grad = torch.zeros_like(p)
        self._sums = [p.grad for p in self._trained if p.grad is not None]

    def _set_rates(self) -> None:
        for i, group in enumerate(self.optimizer.param_groups):
            if group["lr"] != self._rates_set[i]:
                self._rates[i].fill_(group["lr"])
                self._rates_set[i] = group["lr"]

    def _numbers(self) -> list[dict[str, Any]]:
        """What a recording holds as constants."""
        return [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.optimizer.param_groups]

    def _record(self, key: tuple[Any, ...], micro: Micro) -> torch.Tensor:
        """Run one micro-batch and keep it as a graph; where it cannot be one, run it all the same."""
        start = time.perf_counter()
        static = self._static()
        held = [t.detach().to("cpu", copy=True) for t in static]
        counts = self._counts()
        try:
            recording, loss = self._trace(static, micro)
        except Exception as error:  # whatever user code does with a tensor that is being recorded
            self._restore(static, held)
            self._give_up(_reason(error))
            return super().micro(micro)
        self._updated = micro.last
        try:
            self._check(recording, static, counts)
            self._graphs[key] = self._compile(recording, static, micro)
        except Exception as error:
            self._give_up(_reason(error))
        self.seconds += time.perf_counter() - start
        return loss

    def _static(self) -> list[torch.Tensor]:
        """Every tensor that lives from update to update."""
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        groups = [v for group in self.optimizer.param_groups for v in group.values()]
        lasting = [*self.model.parameters(), *self.model.buffers(), *states, *groups, *self._rates, *self._sums]
        return list({id(t): t for t in lasting if isinstance(t, torch.Tensor)}.values())

    def _counts(self) -> list[Any]:
        """What the optimizer keeps in Python."""
        states = self.optimizer.state.values()
        return [[v for v in state.values() if not isinstance(v, torch.Tensor)] for state in states]

    def _restore(self, static: list[torch.Tensor], held: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(static, held, strict=True):
                tensor.copy_(value)
        if not self._sums:
            self._forget()

    def _forget(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def _trace(self, static: list[torch.Tensor], micro: Micro) -> tuple[torch.fx.GraphModule, torch.Tensor]:
        losses = []

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            x, y, weight = tensors[-3:]
            losses.append(Step.micro(self, Micro(x, y, weight, micro.last, micro.epoch_end)))
            if micro.last:
                if not self.precision.step(self.optimizer, self.clip):
                    raise CannotRecordError("the precision decides in Python whether to update")
                torch._foreach_zero_(self._sums) if self._sums else self._forget()
            return losses[0]

        with self._traceable():
            recording = make_fx(run)(*static, micro.x, micro.y, micro.weight)
        return recording, losses[0]

    @contextmanager
    def _traceable(self) -> Iterator[None]:
        """Learning rates as tensors, torch's optimizers in their compilable form, and one thread, which is the recorded one."""
        groups = self.optimizer.param_groups
        own = [dict(group) for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group |= {"lr": rate} | {k: v for k, v in TRACEABLE.items() if k in group}
            with torch.autograd.set_multithreading_enabled(False), _compiling():
                yield
        finally:
            for group, mine in zip(groups, own, strict=True):
                group |= mine

    def _check(self, recording: torch.fx.GraphModule, static: list[torch.Tensor], counts: list[Any]) -> None:
        """Raise where the recorded update did more than the recording says."""
        if self._counts() != counts or self._numbers() != self._recorded:
            raise CannotRecordError("the optimizer counts its updates in Python")
        if {id(t) for t in self._static()} != {id(t) for t in static}:
            raise CannotRecordError("the optimizer or the model replaces tensors of its state where it could write into them")
        for node in recording.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and getattr(value, "op", None) == "get_attr":
                    raise CannotRecordError("the model writes into a tensor that is neither a parameter nor a buffer")

    def _compile(self, recording: torch.fx.GraphModule, static: list[torch.Tensor], micro: Micro) -> Graph:
        with torch.no_grad():  # the backward is in the graph: none is to be made of it
            compiled = torch._inductor.compile(recording, [*static, micro.x, micro.y, micro.weight], options=INDUCTOR)

        @torch.no_grad()
        def run(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return compiled(*static, x, y, weight)

        return Replayed(run) if self._cudagraph and micro.x.is_cuda else run

    def _give_up(self, reason: str) -> None:
        self._op_by_op = True
        self.forward = self._otherwise()
        self._say(f"compile=step: this step cannot be one graph: {reason}. Going on with compile=inductor")


class Replayed:
    """A graph whose second call is captured as a CUDA graph and from then on replayed."""

    def __init__(self, run: Graph) -> None:
        self.run, self.graph, self.warm = run, torch.cuda.CUDAGraph(), False
        self.inputs: list[torch.Tensor] = []

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if not self.warm:  # loads kernels and lets them tune themselves, which a capture cannot hold
            self.warm = True
            return self.run(*inputs)  # type: ignore[call-arg]
        if not self.inputs:
            self.inputs = [t.clone() for t in inputs]
            with torch.cuda.graph(self.graph):
                self.loss = self.run(*self.inputs)  # type: ignore[call-arg]
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.loss


@contextmanager
def _compiling() -> Iterator[None]:
    """torch.compiler.is_compiling() is true, as it is where torch traces; newer torch also knows of recordings like this."""
    flags = [f for f in ("_is_compiling_flag", "_is_non_strict_tracing_flag") if hasattr(torch.compiler, f)]
    held = [getattr(torch.compiler, f) for f in flags]
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in zip(flags, held, strict=True):
            setattr(torch.compiler, flag, value)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if isinstance(error, CannotRecordError) else f"{type(error).__name__}: {lines[0] if lines else ''}"
