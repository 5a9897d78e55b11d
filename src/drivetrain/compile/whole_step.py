"""Compiles forward, backward, clipping and update into one graph; on CUDA it is replayed by a single launch.

The first update runs eagerly and creates the optimizer's state. The second runs eagerly too, while every tensor operation
below autograd is recorded (make_fx on real tensors); parameters, buffers, optimizer state, gradients and learning rates
are the graph's inputs, written in place. Inductor then compiles the recording. If the step does something that a recording
cannot hold (a value read back to Python, a count kept in Python), training continues without it, and logs the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch._inductor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from drivetrain.core.machine.torch_patches import compiling
from drivetrain.core.options import groups
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.step import Step
from drivetrain.core.typed import StateDict

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

logger = logging.getLogger(__name__)


Outputs = tuple[torch.Tensor, ...]
Key = tuple[object, ...]  # what the micro-batches of one graph share


class CapturedGraph:
    """Captures a graph's second call as a CUDA graph, and replays it from then on.

    The graphs of all shapes take their memory from one `pool`. They never run at the same time, and what one returns has
    been read before the next one runs.
    """

    def __init__(self, run: Callable[..., Outputs], pool: _POOL_HANDLE) -> None:
        self._run, self._pool, self._call = run, pool, self._first

    def __call__(self, *inputs: torch.Tensor) -> Outputs:
        return self._call(*inputs)

    def _first(self, *inputs: torch.Tensor) -> Outputs:
        """Load and autotune kernels, which a capture cannot do."""
        self._call = self._second
        return self._run(*inputs)

    def _second(self, *inputs: torch.Tensor) -> Outputs:
        self._call = self._replay if self._capture(inputs) else self._run
        return self._call(*inputs)

    def _capture(self, inputs: tuple[torch.Tensor, ...]) -> bool:
        """Capture one call. Returns False if CUDA cannot: nothing has been computed then, because a capture only records."""
        self._graph, self._inputs = torch.cuda.CUDAGraph(), [t.clone() for t in inputs]
        stream = torch.cuda.current_stream()
        try:
            # In "global" mode the capture would fail when a loader's thread pins memory in the meantime.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._outputs = self._run(*self._inputs)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # some releases of torch leave the stream of a failed capture current
            _end_capture_of_random_numbers()
            logger.warning("compile=step: no CUDA graph: %s. Going on with one launch for each kernel", first_line(error))
            return False
        return True

    def _replay(self, *inputs: torch.Tensor) -> Outputs:
        for captured, given in zip(self._inputs, inputs, strict=True):
            captured.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs


def _end_capture_of_random_numbers() -> None:
    """Let the device draw random numbers again.

    Where a capture fails, torch leaves the device's generator as if it were still captured: each later draw would raise
    "Offset increment outside graph capture". A copy of the generator's state is not captured.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


# Sorting by locality would move recomputed activations (activation checkpointing) from the backward into the forward.
INDUCTOR = {"reorder_for_locality": False}
# torch.optim's settings for an update without Python numbers; the compiler fuses it.
TRACEABLE = {"fused": False, "foreach": True, "capturable": True}

Graph = Callable[..., Outputs]  # tensors of inputs and targets, weight → weighted loss; with scaling also whether it updated


class CannotRecordError(Exception):
    """A step cannot be recorded as one graph; the message is the reason."""


class WholeStep:
    """Runs a step as one graph for each shape of a micro-batch.

    If `inner` cannot be recorded, training continues with `inner` and the forward that `fallback` returns.
    """

    def __init__(
        self,
        inner: Step,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        fallback: Callable[[], Callable[..., torch.Tensor]],
        cudagraph: bool,
        update_state: Callable[[], list[torch.Tensor]] = list,
        log_sums: Callable[[], dict[str, torch.Tensor]] = dict,
        parallel: groups.Parallel | None = None,
    ) -> None:
        self.inner, self._model, self._optimizer, self._update_state = inner, model, optimizer, update_state
        self._fallback, self._cudagraph, self._log_sums, self._parallel = fallback, cudagraph, log_sums, parallel
        self.seconds = 0.0  # spent recording and compiling
        self._eager, self._started = True, False
        self._attempted = False  # a micro-batch of this update was recorded, or could not be
        self._updated = False  # the update's last micro-batch has updated already
        self._made: list[torch.Tensor] = []  # whether it did, where the graph decides
        self._graphs: dict[Key, Graph] = {}
        self._pool: _POOL_HANDLE | None = None  # the memory of all CUDA graphs
        self._trained: list[torch.nn.Parameter] = []  # parameters that get gradients
        self._gradient_sums: list[torch.Tensor] = []  # their gradients, where an update has several micro-batches
        self._lr_tensors: list[torch.Tensor] = []
        self._counters: list[tuple[StateDict, str, torch.device]] = []  # states, the names of their counters, and where

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        """Run forward and backward of one micro-batch; after an update's last one, also the update."""
        if not self._eager and batch.last:
            self._copy_lrs()
            if self._constants() != self._recorded_constants:
                self._give_up("a schedule moves a number of the optimizer other than its learning rate (momentum, weight decay)")
        if self._eager:
            self.inner.micro_batch(batch, loss_sum)
            return
        if not batch.last and not self._gradient_sums:
            self._gradient_sums = [torch.zeros_like(p) for p in self._trained]
        key = (batch.last, bool(self._gradient_sums), trees.signature(batch.x), trees.signature(batch.y))
        graph = self._graphs.get(key)
        if graph is None:
            self._record(key, batch, loss_sum)
            return
        self._updated = batch.last
        loss, *self._made = self._call_graph(graph, batch)
        loss_sum += loss

    def update(self) -> bool:
        """Update the weights, unless the graph has done so."""
        done = self._update()
        if self._attempted:
            self._attempted = False
            self._keep_ranks_together()
        return done

    def _update(self) -> bool:
        if self._updated:
            self._updated = False
            return all(map(bool, self._made))  # read where loss scaling may skip an update, as an eager one does
        trained = [p for p in self._model.parameters() if p.grad is not None]
        done = self.inner.update()
        if done and not self._started:
            self._start_graphs(trained)
        return done

    def _keep_ranks_together(self) -> None:
        """Go on without graphs where any rank has to, from rank 0's weights: a graph rounds otherwise, and ranks would drift."""
        parallel = self._parallel
        if parallel is None or not any(parallel.broadcast_object(parallel.gather_object(self._eager))):
            return
        if not self._eager:
            self._give_up("another rank cannot record it")
        parallel.broadcast_tensors([p.detach() for p in self._trained] + self._optimizer_tensors())

    def zero_grad(self) -> None:
        """Clear the gradients. Graphs clear their own; the sums are cleared in case an update is repeated."""
        if self._eager:
            self.inner.zero_grad()
        elif self._gradient_sums:
            torch._foreach_zero_(self._gradient_sums)

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        """Return the inner step with another forward: a graph has none to replace."""
        return self.inner.with_forward(forward)

    def _call_graph(self, graph: Graph, batch: MicroBatch) -> Outputs:
        try:
            return graph(*_tensors(batch))
        except Exception as error:  # some weights may be updated already, so the update must not be repeated
            raise RuntimeError(f"compile=step: the graph of an update failed half-way: {first_line(error)}") from None

    def _start_graphs(self, trained: list[torch.nn.Parameter]) -> None:
        """Use graphs from here on: the optimizer has its state, and it is known which parameters get gradients."""
        self._trained, self._started, self._eager = trained, True, False
        device = trained[0].device
        self._lrs = [float(group["lr"]) for group in self._param_groups]
        self._lr_tensors = [torch.tensor(lr, device=device) for lr in self._lrs]
        self._recorded_constants = self._constants()
        for state in self._optimizer.state.values():  # a graph cannot update step counters that torch keeps on the CPU
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    self._counters.append((state, name, value.device))
                    state[name] = value.to(device)

    @property
    def _param_groups(self) -> list[StateDict]:
        return self._optimizer.param_groups

    def _copy_lrs(self) -> None:
        for i, group in enumerate(self._param_groups):
            if group["lr"] != self._lrs[i]:
                self._lr_tensors[i].fill_(group["lr"])
                self._lrs[i] = group["lr"]

    def _constants(self) -> list[StateDict]:
        """Return the optimizer settings that a recording holds as constants, but a schedule could change."""
        return [{k: v for k, v in g.items() if isinstance(v, float | tuple) and k != "lr"} for g in self._param_groups]

    def _record(self, key: Key, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        """Run one micro-batch and record it as a graph. If that fails, run it eagerly."""
        start, self._attempted = time.perf_counter(), True
        static, numbers = self._state()
        saved = [t.detach().to("cpu", copy=True) for t in static]
        self._set_gradients(self._gradient_sums or [None] * len(self._trained))
        try:
            recording, (loss, *self._made) = self._trace(static, batch)
        except Exception as error:  # user code may do anything with a tensor that is being recorded
            with torch.no_grad():
                for tensor, value in zip(static, saved, strict=True):
                    tensor.copy_(value)
            self._give_up(_reason(error))
            self.inner.micro_batch(batch, loss_sum)
            return
        loss_sum += loss
        self._updated = batch.last
        try:
            self._check(recording, static, numbers)
            self._graphs[key] = self._compile(recording, static, batch)
        except Exception as error:
            self._give_up(_reason(error))
        self.seconds += time.perf_counter() - start

    def _state(self) -> tuple[list[torch.Tensor], list[object]]:
        """Return every tensor that persists between updates, and the Python values of the optimizer's state."""
        model, optimizer = self._model, self._optimizer
        update = (*self._lr_tensors, *self._gradient_sums, *self._update_state(), *self._log_sums().values())
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *update)}
        numbers: list[object] = []
        _collect([optimizer.state, vars(optimizer)], tensors, numbers, set())
        return list(tensors.values()), numbers

    def _set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for p, gradient in zip(self._trained, gradients, strict=True):
            p.grad = gradient

    def _trace(self, static: list[torch.Tensor], batch: MicroBatch) -> tuple[torch.fx.GraphModule, Outputs]:
        outputs: list[Outputs] = []

        def run(*tensors: torch.Tensor) -> Outputs:
            x, y, weight, shares = trees.unflatten(tensors[len(static) :], (batch.x, batch.y, batch.weight, batch.shares))
            loss = torch.zeros_like(weight)
            self.inner.micro_batch(MicroBatch(x, y, weight, batch.last, batch.epoch_end, shares=shares), loss)
            outputs.append((loss, *self._trace_update()) if batch.last else (loss,))
            return outputs[0]

        with self._traceable():
            recording = make_fx(run)(*static, *_tensors(batch))
        return recording, outputs[0]

    def _trace_update(self) -> Outputs:
        """Make the update and clear the gradients. Returns whether it was made, where that is known on the device only."""
        with torch.no_grad():
            before = [(t, t.clone()) for t in self._optimizer_tensors()] if self._update_state() else []
            made: bool | torch.Tensor = self.inner.update()
            if made is False:
                raise CannotRecordError("the precision decides in Python whether to update")
            for tensor, value in before:  # set back after an overflow
                tensor.copy_(torch.where(made, tensor, value))  # type: ignore[arg-type]  # with state it is a tensor
            if self._gradient_sums:
                torch._foreach_zero_(self._gradient_sums)
            else:
                self._set_gradients([None] * len(self._trained))
        return (made,) if isinstance(made, torch.Tensor) else ()

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        """Return the parameters that are updated, and the optimizer's state."""
        tensors: dict[int, torch.Tensor] = {}
        _collect([self._optimizer.state, vars(self._optimizer)], tensors, [], set())
        return list(tensors.values())

    @contextmanager
    def _traceable(self) -> Iterator[None]:
        """Set learning rates as tensors and torch's optimizers to their traceable form, and run autograd in this thread."""
        groups = self._param_groups
        saved = [dict(group) for group in groups]
        try:
            for group, rate in zip(groups, self._lr_tensors, strict=True):
                group.update({"lr": rate} | {k: v for k, v in TRACEABLE.items() if k in group})
            with torch.autograd.set_multithreading_enabled(False), compiling():
                yield
        finally:
            for group, before in zip(groups, saved, strict=True):
                group.update({k: before[k] for k in ("lr", *TRACEABLE) if k in before})

    def _check(self, recording: torch.fx.GraphModule, static: list[torch.Tensor], numbers: list[object]) -> None:
        """Raise CannotRecordError if the update did something that the recording does not contain."""
        tensors_now, numbers_now = self._state()
        if numbers_now != numbers:
            raise CannotRecordError("the optimizer keeps count in Python")
        if {id(t) for t in tensors_now} != {id(t) for t in static}:
            raise CannotRecordError("the optimizer or the model replaces tensors of its state where it could write into them")
        for node in recording.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and any(getattr(v, "op", None) == "get_attr" for v in (value if isinstance(value, list) else [value])):
                    raise CannotRecordError("the model writes into a tensor that is neither a parameter nor a buffer")

    def _compile(self, recording: torch.fx.GraphModule, static: list[torch.Tensor], batch: MicroBatch) -> Graph:
        # Static shapes in a ShapeEnv: without one inductor would not cache the code for the next run.
        fake = FakeTensorMode(shape_env=ShapeEnv())
        inputs: list[torch.Tensor | int | torch.SymInt | None] = [
            fake.from_tensor(t, static_shapes=True) for t in (*static, *_tensors(batch))
        ]
        with torch.no_grad(), tracing(TracingContext(fake)):  # no gradients: the backward is in the graph
            compiled = torch._inductor.compile(recording, inputs, options=INDUCTOR)

        @torch.no_grad()
        def run(*tensors: torch.Tensor) -> Outputs:
            return tuple(compiled(*static, *tensors))

        if not (self._cudagraph and batch.weight.is_cuda):
            return run
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return CapturedGraph(run, self._pool)

    def _give_up(self, reason: str) -> None:
        self._eager = True
        for state, name, device in self._counters:  # an eager update reads them there
            state[name] = state[name].to(device)
        self._set_gradients(self._gradient_sums or [None] * len(self._trained))
        self.inner = self.inner.with_forward(self._fallback())
        logger.warning("compile=step: this step cannot be one graph: %s. Going on with compile=inductor", reason)


def _tensors(batch: MicroBatch) -> list[torch.Tensor]:
    """Return what a graph is called with: the tensors of inputs and targets, the weight, and the shares if there are any."""
    return trees.leaves((batch.x, batch.y, batch.weight, batch.shares))


def _collect(value: object, tensors: dict[int, torch.Tensor], numbers: list[object], seen: set[int]) -> None:
    """Collect all reachable tensors and plain values."""
    if isinstance(value, torch.Tensor):
        tensors[id(value)] = value
    elif isinstance(value, bool | int | float | str | None):
        numbers.append(value)
    elif id(value) not in seen and not callable(value):
        seen.add(id(value))
        if isinstance(value, dict):
            value = list(value.values())
        for item in value if isinstance(value, list | tuple | set) else getattr(value, "__dict__", {}).values():
            _collect(item, tensors, numbers, seen)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CannotRecordError) else first_line(error)
