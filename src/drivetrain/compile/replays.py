"""Replays compiled micro-batches on CUDA, each sequence of them by a single launch.

A CUDA graph contains the gathering of inputs from a piece of the epoch, the learning rates, the micro-batches and the sum of
their losses. Values that change between replays are in fixed memory: the rates, and the inputs or their place in the piece.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch, Piece
from drivetrain.core.step.tensors import has_streams

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

logger = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, ...]


class CapturedGraph:
    """Captures the second call of a function as a CUDA graph, and replays it from then on.

    All graphs take their memory from one `pool`. They never run at the same time, and each result is read before the next one
    runs.
    """

    def __init__(self, run: Callable[[], Outputs], pool: _POOL_HANDLE) -> None:
        self._run, self._pool, self._call = run, pool, self._first

    def __call__(self) -> Outputs:
        return self._call()

    def _first(self) -> Outputs:
        """Load and autotune kernels, because a capture cannot."""
        self._call = self._second
        return self._run()

    def _second(self) -> Outputs:
        self._call = self._replay if self._capture() else self._run
        return self._call()

    def _capture(self) -> bool:
        """Capture one call. Returns False if CUDA cannot: nothing is computed then, because a capture only records."""
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # In "global" mode the capture would fail when a loader's thread pins memory in the meantime.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._outputs = self._run()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # some releases of torch leave the stream of a failed capture current
            _end_capture_of_random_numbers()
            logger.warning("compile=step: no CUDA graph: %s. Continuing with one launch for each kernel", first_line(error))
            return False
        return True

    def _replay(self) -> Outputs:
        self._graph.replay()
        return self._outputs


def _end_capture_of_random_numbers() -> None:
    """Let the device draw random numbers again.

    After a failed capture, torch leaves the device's generator in capture mode: each later draw would raise
    "Offset increment outside graph capture". A copy of the generator's state is not captured.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def tensors_of(batch: MicroBatch) -> list[torch.Tensor]:
    """Return the arguments of a graph: the tensors of inputs and targets, the weight, and the shares of a mixed batch if any."""
    return trees.leaves((batch.x, batch.y, batch.weight, batch.shares))


class ReplayedShape:
    """A compiled micro-batch of one shape, with the memory for its inputs in replays."""

    def __init__(self, run: Callable[..., Outputs], batch: MicroBatch) -> None:
        self.run, self.last = run, batch.last
        self.memory = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors_of(batch)]
        self.samples = len(trees.leaves((batch.x, batch.y)))  # tensors with a row for each sample
        self.rows = torch.arange(trees.length(batch.y), device=batch.weight.device)
        self._given: list[torch.Tensor | None] = [None] * len(self.memory)

    def load(self, batch: MicroBatch, first: int) -> None:
        """Copy a micro-batch's tensors from number `first` on, except an unchanged weight or share."""
        for number, given in enumerate(tensors_of(batch)[first:], first):
            if number < self.samples or given is not self._given[number]:
                self.memory[number].copy_(given, non_blocking=True)
                self._given[number] = given

    def has_weight(self, batch: MicroBatch) -> bool:
        """Return whether everything except its samples is in memory."""
        return all(a is b for a, b in zip(tensors_of(batch)[self.samples :], self._given[self.samples :], strict=True))


class PlannedReplay(NamedTuple):
    """A micro-batch to run, and the learning rates if it ends an update."""

    graph: ReplayedShape
    batch: MicroBatch
    rates: list[float]


def flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view (n, values) of a tensor's n samples in memory order; None if other values lie between."""
    values = tensor[:1].numel()
    in_order = tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    return tensor.as_strided((len(tensor), values), (values, 1)) if in_order else None


@dataclass(eq=False)
class Replays:
    """Runs sequences of micro-batches, each kind of sequence as one CUDA graph."""

    rates: Sequence[torch.Tensor]  # 0-d, the learning rates that the graphs read
    pool: _POOL_HANDLE
    _graphs: dict[tuple[int, ...], tuple[CapturedGraph, torch.Tensor]] = field(default_factory=dict)  # with its updates' rates
    _given: dict[tuple[int, ...], list[list[float]]] = field(default_factory=dict)  # these rates
    _piece: Piece | None = None
    _memory: list[torch.Tensor] = field(default_factory=list)  # (n, values) of each tensor of the piece
    _row: int = 0  # of the next micro-batch in it

    def __post_init__(self) -> None:
        self._place = torch.zeros(1, dtype=torch.int64, device=self.rates[0].device)  # the same, on the device

    def gathers(self, batch: MicroBatch) -> bool:
        """Return whether a graph can take the micro-batch from its piece."""
        piece = batch.piece
        if piece is None:
            return False
        wholes, parts = trees.leaves((piece.x, piece.y)), trees.leaves((batch.x, batch.y))
        return len(wholes) == len(parts) and all(
            flat(whole) is not None and part.data_ptr() == whole[batch.row :].data_ptr()
            for whole, part in zip(wholes, parts, strict=True)
        )

    def __call__(self, works: Sequence[PlannedReplay]) -> Outputs:
        """Run consecutive micro-batches of a piece, or a single one."""
        gathers = self.gathers(works[0].batch)
        if gathers:
            self._load(works[0].batch)
        for graph, batch, _ in works:
            graph.load(batch, graph.samples if gathers else 0)
        key = (gathers, *(id(work.graph) for work in works))
        given = [work.rates for work in works if work.graph.last]
        if key not in self._graphs:
            table = torch.tensor(given, device=self.rates[0].device)
            run = self._sequence([work.graph for work in works], table, gathers)
            self._graphs[key], self._given[key] = (CapturedGraph(run, self.pool), table), given
        run_all, table = self._graphs[key]
        if given != self._given[key]:
            new = torch.tensor(given)
            table.copy_(new.pin_memory() if has_streams(table.device) else new, non_blocking=True)
            self._given[key] = given
        self._row += sum(len(work.graph.rows) for work in works) if gathers else 0
        return run_all()

    def _load(self, batch: MicroBatch) -> None:
        """Copy the batch's piece of the epoch into the buffer that the graphs read, if it changed, and set its place there."""
        piece = batch.piece
        assert piece is not None
        if piece is not self._piece:
            given = [view for t in trees.leaves((piece.x, piece.y)) if (view := flat(t)) is not None]
            if not self._memory or len(self._memory[0]) < len(given[0]):  # larger than before
                self._memory = [torch.empty_like(t) for t in given]
                self._graphs = {key: graph for key, graph in self._graphs.items() if not key[0]}
            for memory, t in zip(self._memory, given, strict=True):
                memory[: len(t)].copy_(t)
            self._piece = piece
        if batch.row != self._row:
            self._place.fill_(batch.row)
            self._row = batch.row

    def _sequence(self, graphs: Sequence[ReplayedShape], table: torch.Tensor, gathers: bool) -> Callable[[], Outputs]:
        memory, place = self._memory, self._place

        @torch.no_grad()
        def run() -> Outputs:
            made: Outputs = ()
            updates = iter(table.unbind())
            for graph in graphs:
                if gathers:
                    rows = place + graph.rows
                    for source, target in zip(memory, graph.memory, strict=False):  # weight and shares are already copied
                        torch.index_select(source, 0, rows, out=flat(target))
                    place.add_(len(graph.rows))
                if graph.last:
                    torch._foreach_copy_(list(self.rates), list(next(updates).unbind()))
                made = graph.run(*graph.memory)
            return made

        return run
