"""Compiles forward, backward, clipping and update into one graph; on CUDA it is replayed by a single launch.

The first update runs eagerly and creates the optimizer's state. The second runs eagerly too, while every tensor operation below
autograd is recorded (make_fx on real tensors); parameters, buffers, optimizer state, gradients and learning rates are the graph's
inputs, written in place. Inductor then compiles the recording. If a recording cannot hold the step (it reads a value back to
Python, or counts in Python), training continues without it and logs the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch._inductor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from drivetrain.compile.replays import Outputs, PlannedReplay, ReplayedShape, Replays, first_line, tensors_of
from drivetrain.core.machine.torch_patches import compiling
from drivetrain.core.options import groups
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.step import Made, Step
from drivetrain.core.typed import StateDict

logger = logging.getLogger(__name__)

Key = tuple[object, ...]  # common properties of one graph's micro-batches


# Sorting by locality would move recomputed activations (activation checkpointing) from the backward into the forward.
INDUCTOR = {"reorder_for_locality": False}
# torch.optim's settings for an update without Python numbers; the compiler fuses it.
TRACEABLE = {"fused": False, "foreach": True, "capturable": True}

Compiled = Callable[..., Outputs]  # tensors of inputs and targets, weight → with scaling whether it updated


def has_graphs(device: torch.device) -> bool:
    """Return whether launches on this device can be captured."""
    return device.type == "cuda"


class CannotRecordError(Exception):
    """The step cannot be recorded as one graph; the message is the reason."""


class WholeStep:
    """Runs a step as one graph for each shape of a micro-batch. On CUDA `together` updates are replayed at once.

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
        together: int = 1,
    ) -> None:
        self.inner, self._model, self._optimizer, self._update_state = inner, model, optimizer, update_state
        self._fallback, self._cudagraph, self._log_sums, self._parallel = fallback, cudagraph, log_sums, parallel
        self._together = together
        self.seconds = 0.0  # spent recording and compiling
        self._eager, self._started = True, False
        self._attempted = False  # this update has tried to record a micro-batch
        self._updated = False  # the update's last micro-batch has updated the weights
        self._cleared = False  # and cleared the gradients
        self._made: Outputs = ()  # whether it did, where the graph decides
        self._graphs: dict[Key, Compiled] = {}
        self._replays: Replays | None = None
        self._shapes: dict[Key, ReplayedShape] = {}  # of the replayed updates
        self._waiting: list[PlannedReplay] = []  # micro-batches waiting to run together
        self._loss_sum: torch.Tensor | None = None  # the loss sum that graphs add to, from the first update
        self._own_sum: torch.Tensor | None = None  # the graphs' own sum, if they are called with another one
        self._trained: list[torch.nn.Parameter] = []  # parameters that get gradients
        self._gradient_sums: list[torch.Tensor] = []  # their gradients, if an update has several micro-batches
        self._lr_tensors: list[torch.Tensor] = []
        self._counters: list[tuple[StateDict, str, torch.device]] = []  # states, the names and the devices of their counters

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        """Run forward and backward of one micro-batch; after an update's last one, also the update."""
        if not self._eager and batch.last and self._constants() != self._recorded_constants:
            self.settle()
            self._give_up("a schedule changes a setting of the optimizer other than its learning rate (momentum, weight decay)")
        if self._eager:
            self._loss_sum = loss_sum if self._loss_sum is None else self._loss_sum
            self.inner.micro_batch(batch, loss_sum)
            return
        if not batch.last and not self._gradient_sums:
            self._gradient_sums = [torch.zeros_like(p) for p in self._trained]
        if loss_sum is self._loss_sum:
            self._run(batch, loss_sum)
            return
        if self._own_sum is None:
            self._own_sum = torch.zeros_like(loss_sum)
        self._run(batch, self._own_sum)
        loss_sum += self._own_sum
        self._own_sum.zero_()

    def _run(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        key = (
            batch.last, bool(self._gradient_sums), trees.signature(batch.x), trees.signature(batch.y), loss_sum is self._loss_sum,
        )  # fmt: skip
        compiled = self._graphs.get(key)
        if compiled is None:
            self.settle()
            self._copy_lrs()
            self._record(key, batch, loss_sum)
            return
        self._updated = batch.last
        if self._replays is None:
            self._copy_lrs()
            self._made = self._call(lambda: compiled(*tensors_of(batch)))
            return
        graph = self._shapes.get(key) or self._shapes.setdefault(key, ReplayedShape(compiled, batch))
        rates, replays = [group["lr"] for group in self._param_groups] if batch.last else [], self._replays
        work = PlannedReplay(graph, batch, rates)
        if self._together == 1 or loss_sum is not self._loss_sum or not replays.gathers(batch) or not graph.has_weight(batch):
            self.settle()
            self._made = self._call(lambda: replays([work]))
            return
        if self._waiting and self._waiting[0].batch.piece is not batch.piece:
            self.settle()
        self._waiting.append(work)
        if sum(each.graph.last for each in self._waiting) == self._together:
            waiting, self._waiting = self._waiting, []
            self._call(lambda: replays(waiting))

    def settle(self) -> None:
        """Run the waiting micro-batches one by one."""
        waiting, self._waiting, replays = self._waiting, [], self._replays
        for work in waiting:
            self._call(lambda work=work: replays([work]))  # type: ignore[misc]

    def waits(self) -> bool:
        """Return whether the last update waits for a joint run."""
        return bool(self._waiting)

    def update(self) -> Made:
        """Update the weights, unless the graph has done so."""
        done = self._update()
        if self._attempted:
            self._attempted = False
            self._keep_ranks_together()
        return done

    def _update(self) -> Made:
        if self._updated:
            self._updated, self._cleared = False, True
            return all(map(bool, self._made))  # read if loss scaling may skip an update, like an eager step
        trained = [p for p in self._model.parameters() if p.grad is not None]
        done = self.inner.update()
        if not self._started and done:
            self._start_graphs(trained)
        return done

    def _keep_ranks_together(self) -> None:
        """Continue without graphs if any rank has to, from rank 0's weights: graphs round differently, and ranks would drift."""
        parallel = self._parallel
        if parallel is None or not any(parallel.broadcast_object(parallel.gather_object(self._eager))):
            return
        if not self._eager:
            self._give_up("another rank cannot record it")
        parallel.broadcast_tensors([p.detach() for p in self._trained] + self._optimizer_tensors())

    def zero_grad(self) -> None:
        """Clear the gradients. Graphs clear their own; sums are cleared in case of a repeated update."""
        if self._eager:
            self.inner.zero_grad()
        elif self._gradient_sums and not self._cleared:
            torch._foreach_zero_(self._gradient_sums)
        self._cleared = False

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        """Return the inner step with another forward, because a graph has none to replace."""
        return self.inner.with_forward(forward)

    def _call(self, run: Callable[[], Outputs]) -> Outputs:
        try:
            return run()
        except Exception as error:  # some weights may be updated already, so the update must not be repeated
            raise RuntimeError(f"compile=step: the graph of an update failed half-way: {first_line(error)}") from None

    def _start_graphs(self, trained: list[torch.nn.Parameter]) -> None:
        """Use graphs from here on: the optimizer has its state, and the parameters with gradients are known."""
        self._trained, self._started, self._eager = trained, True, False
        device = trained[0].device
        self._lrs = [float(group["lr"]) for group in self._param_groups]
        self._lr_tensors = [torch.tensor(lr, device=device) for lr in self._lrs]
        self._recorded_constants = self._constants()
        for state in self._optimizer.state.values():  # a graph cannot update step counters on the CPU
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    self._counters.append((state, name, value.device))
                    state[name] = value.to(device)

    @property
    def _param_groups(self) -> list[StateDict]:
        return self._optimizer.param_groups

    def _copy_lrs(self) -> None:
        for i, group in enumerate(self._param_groups):
            if group["lr"] != self._lrs[i] or self._replays is not None:  # replays also write the tensors
                self._lr_tensors[i].fill_(group["lr"])
                self._lrs[i] = group["lr"]

    def _constants(self) -> list[StateDict]:
        """Return the optimizer's settings that are constants in a recording but that a schedule could change."""
        return [{k: v for k, v in g.items() if isinstance(v, float | tuple) and k != "lr"} for g in self._param_groups]

    def _record(self, key: Key, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        """Run one micro-batch and record it as a graph. If that fails, run it eagerly."""
        start, self._attempted = time.perf_counter(), True
        static, numbers = self._state(loss_sum)
        saved = [t.detach().to("cpu", copy=True) for t in static]
        self._set_gradients(self._gradient_sums or [None] * len(self._trained))
        try:
            recording, self._made = self._trace(static, batch, loss_sum)
        except Exception as error:  # user code may do anything with a recorded tensor
            with torch.no_grad():
                for tensor, value in zip(static, saved, strict=True):
                    tensor.copy_(value)
            self._give_up(_reason(error))
            self.inner.micro_batch(batch, loss_sum)
            return
        self._updated = batch.last
        try:
            self._check(recording, static, numbers, loss_sum)
            self._graphs[key] = self._compile(recording, static, batch)
        except Exception as error:
            self._give_up(_reason(error))
        self.seconds += time.perf_counter() - start

    def _state(self, loss_sum: torch.Tensor) -> tuple[list[torch.Tensor], list[object]]:
        """Return every tensor that persists between updates, and the Python values of the optimizer's state."""
        model, optimizer = self._model, self._optimizer
        update = (*self._lr_tensors, *self._gradient_sums, *self._update_state(), *self._log_sums().values(), loss_sum)
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *update)}
        numbers: list[object] = []
        _collect([optimizer.state, vars(optimizer)], tensors, numbers, set())
        return list(tensors.values()), numbers

    def _set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for p, gradient in zip(self._trained, gradients, strict=True):
            p.grad = gradient

    def _trace(
        self, static: list[torch.Tensor], batch: MicroBatch, loss_sum: torch.Tensor
    ) -> tuple[torch.fx.GraphModule, Outputs]:
        outputs: list[Outputs] = []

        def run(*tensors: torch.Tensor) -> Outputs:
            x, y, weight, shares = trees.unflatten(tensors[len(static) :], (batch.x, batch.y, batch.weight, batch.shares))
            self.inner.micro_batch(MicroBatch(x, y, weight, batch.last, batch.epoch_end, shares=shares), loss_sum)
            outputs.append(self._trace_update() if batch.last else ())
            return outputs[0]

        with self._traceable():
            recording = make_fx(run)(*static, *tensors_of(batch))
        return recording, outputs[0]

    def _trace_update(self) -> Outputs:
        """Make the update and clear the gradients. Returns whether it was made, where only the device knows."""
        with torch.no_grad():
            before = [(t, t.clone()) for t in self._optimizer_tensors()] if self._update_state() else []
            made: Made | torch.Tensor = self.inner.update()
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

    def _check(
        self, recording: torch.fx.GraphModule, static: list[torch.Tensor], numbers: list[object], loss_sum: torch.Tensor
    ) -> None:
        """Raise CannotRecordError if the update did something that the recording does not contain."""
        tensors_now, numbers_now = self._state(loss_sum)
        if numbers_now != numbers:
            raise CannotRecordError("the optimizer keeps count in Python")
        if {id(t) for t in tensors_now} != {id(t) for t in static}:
            raise CannotRecordError("the optimizer or the model replaces tensors of its state instead of writing into them")
        for node in recording.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and any(getattr(v, "op", None) == "get_attr" for v in (value if isinstance(value, list) else [value])):
                    raise CannotRecordError("the model writes into a tensor that is neither a parameter nor a buffer")

    def _compile(self, recording: torch.fx.GraphModule, static: list[torch.Tensor], batch: MicroBatch) -> Compiled:
        # Static shapes in a ShapeEnv: without one inductor would not cache the code for the next run.
        fake = FakeTensorMode(shape_env=ShapeEnv())
        inputs: list[torch.Tensor | int | torch.SymInt | None] = [
            fake.from_tensor(t, static_shapes=True) for t in (*static, *tensors_of(batch))
        ]
        with torch.no_grad(), tracing(TracingContext(fake)):  # without gradients: the backward is in the graph
            compiled = torch._inductor.compile(recording, inputs, options=INDUCTOR)

        @torch.no_grad()
        def run(*tensors: torch.Tensor) -> Outputs:
            return tuple(compiled(*static, *tensors))

        if self._replays is None and self._cudagraph and has_graphs(batch.weight.device):
            self._replays = Replays(self._lr_tensors, torch.cuda.graph_pool_handle())
        return run

    def _give_up(self, reason: str) -> None:
        self._eager = True
        for state, name, device in self._counters:  # where an eager update reads them
            state[name] = state[name].to(device)
        self._set_gradients(self._gradient_sums or [None] * len(self._trained))
        self.inner = self.inner.with_forward(self._fallback())
        logger.warning("compile=step: this step cannot be one graph: %s. Continuing with compile=inductor", reason)


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
