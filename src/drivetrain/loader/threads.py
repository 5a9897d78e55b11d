"""loader=threads: threads read ahead. Decoding releases Python's lock, and no batch is copied between processes."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Literal

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.guards import usable_cores
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.options.option import Count, Positive
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.tensors import has_streams
from drivetrain.core.step.trees import Tree
from drivetrain.loader.base import Ahead, Batch, Loader, Pipeline, ReadBatch, reading_advice, timeout_error

LOOK_S = 0.25  # between two checks for a stop signal
CLOSE_TIMEOUT_S = 1.0  # wait for the threads' current jobs when the pool closes
PIECES_PER_THREAD = 2  # piece of a batch: small enough that all threads finish together


class Threads(Loader):
    """Threads of this process read batches ahead, and share the samples of each.

    A source sets `parallel_read` if reading a sample is expensive, such as decoding; other sources are read by one thread per
    batch.
    """

    effect = "exact"

    def __init__(
        self,
        num_threads: Count | Literal["auto"] = "auto",
        prefetch_factor: Ahead = 2,
        pin_memory: bool = True,
        timeout_s: Positive = 120.0,
    ) -> None:
        self.num_threads, self.prefetch_factor = num_threads, prefetch_factor
        self.pin_memory, self.timeout_s = pin_memory, timeout_s

    def readers(self) -> tuple[str, str, int]:
        return "threads", "loader.num_threads", 0 if self.num_threads == "auto" else self.num_threads

    def copies_ahead(self) -> int:
        return int(self.pin_memory)

    def advice(self, pipeline: Pipeline) -> str | None:
        return reading_advice(pipeline, "loader.num_threads", self.threads())

    def refusal(self, pipeline: Pipeline) -> str | None:
        if problem := super().refusal(pipeline):
            return problem
        if problem := refused(pipeline.drawn()):
            return problem
        problem = None if pipeline.own_code is None else pipeline.own_code.unshareable(threads=True)
        return problem and (
            f"{problem}: set loader=workers (with loader=device loader.reader=workers), or let each thread open its own, read by "
            "os.pread, or hold a lock"
        )

    def threads(self) -> int:
        """Return the number of threads; auto is the number of this rank's usable cores."""
        return usable_cores() if self.num_threads == "auto" else self.num_threads

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[ReadBatch]:
        started: deque[SharedBatch] = deque()
        remaining = iter(requests)
        pin = self.pin_memory and has_streams(device)
        code = pipeline.own_code
        if code is not None:
            code.share(watch_torch=device.type != "cpu")
        pool = ThreadPool(self.threads())
        try:
            while True:
                while len(started) <= self.prefetch_factor and (request := next(remaining, None)) is not None:
                    started.append(SharedBatch(pipeline, request, finish, self.threads(), pin))
                    started[-1].start(pool)
                if not started:
                    return
                read = self._result(started[0])
                if code is not None and code.suspected():
                    self._check(pipeline, started)
                yield *read, started.popleft().request
        finally:
            pool.close()
            for batch in started:
                batch.future.cancel()

    def _check(self, pipeline: Pipeline, started: Iterable[SharedBatch]) -> None:
        """Reread, alone, the samples that were read while a random stream moved: other code may have moved it.

        Raises UserError.
        """
        for batch in started:
            self._result(batch)
        if problem := refused(pipeline.drawn(torch.cat([batch.indices for batch in started]))):
            raise UserError(problem)

    def _result(self, batch: SharedBatch) -> Batch:
        since = time.monotonic()
        while not batch.future.done():
            if (left := since + self.timeout_s - time.monotonic()) <= 0 or StopFlag.waited_long_enough(since):
                reader, index = next(iter(batch.reading.items()), ("every loader thread", int(batch.indices[0])))
                raise timeout_error(reader, self.timeout_s, batch.pipeline, index)
            wait([batch.future], min(left, LOOK_S))
        return batch.future.result()


def refused(drawn: Sequence[str]) -> str | None:
    """Return why threads cannot read samples that draw from these streams; None without any."""
    if not drawn:
        return None
    return (
        f"the samples draw from {', '.join(drawn)}, which all threads share, so that their draws would change from run to run: "
        "set loader=workers, or with loader=device loader.reader=workers"
    )


class ThreadPool:
    """Daemon threads that run jobs in order: unlike concurrent.futures' threads, a stuck one does not keep the process alive."""

    def __init__(self, threads: int) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[object, ...]] | None] = queue.SimpleQueue()
        self.closed = False
        names = (f"loader thread {n + 1} of {threads}" for n in range(threads))
        self.threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self.threads:
            thread.start()

    def submit(self, job: Callable[..., None], *args: object) -> None:
        """Queue a job."""
        self.jobs.put((job, args))

    def close(self) -> None:
        """Drop the jobs that have not begun, and wait up to CLOSE_TIMEOUT_S for those that have.

        A process that ends while a thread runs C++ code can crash.
        """
        self.closed = True
        for _ in self.threads:
            self.jobs.put(None)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            if not self.closed:
                job[0](*job[1])


class SharedBatch:
    """A batch read by several threads: each writes a piece straight into the batch, and the last one finishes it."""

    def __init__(self, pipeline: Pipeline, request: Request, finish: bool, threads: int, pin: bool) -> None:
        self.pipeline, self.request, self.finish, self.pin = pipeline, request, finish, pin
        self.indices = request.indices_to_read()
        split = self.pipeline.source.parallel_read
        pieces = min(len(self.indices), PIECES_PER_THREAD * threads)
        self.pieces = self.indices.tensor_split(pieces) if split else (self.indices,)
        self.left = len(self.pieces)
        self.lock = threading.Lock()
        self.seconds = 0.0  # seconds of all threads together
        self.reading: dict[str, int] = {}  # thread → the first sample of its current piece
        self.stored: Batch | None = None  # inputs and targets that several pieces are copied into
        self.future: Future[Batch] = Future()

    def start(self, pool: ThreadPool) -> None:
        """Submit the pieces; `future` will hold the batch."""
        offset = 0
        for piece in self.pieces:
            pool.submit(self._read, piece, offset)
            offset += len(piece)

    def _read(self, indices: torch.Tensor, offset: int) -> None:
        """Read a piece into the batch, and finish the batch if this was the last piece."""
        try:
            if self.future.done():  # another piece has failed
                return
            began = time.perf_counter()
            thread = threading.current_thread().name
            self.reading[thread] = int(indices[0])
            piece = self.pipeline.read_samples(indices, self.request, alone=False)
            del self.reading[thread]
            x, y = self._store(*piece, offset)
            with self.lock:
                self.left -= 1
                last = self.left == 0
                self.seconds += time.perf_counter() - began
            if last:
                began = time.perf_counter()
                x, y = self.pipeline.finish(x, y, self.request) if self.finish else (x, y)
                batch = (pinned(x), pinned(y)) if self.pin else (x, y)
                self.request.ready = time.perf_counter()
                self.request.seconds = self.seconds + self.request.ready - began
                self.future.set_result(batch)
        except BaseException as error:  # raised by the waiting loop
            with self.lock:
                if not self.future.done():
                    self.future.set_exception(error)

    def _store(self, x: Tree, y: Tree, offset: int) -> Batch:
        """Copy a piece to its rows of the batch; return the batch. A batch of one piece is that piece."""
        if len(self.pieces) == 1:
            return x, y
        with self.lock:
            if self.stored is None:
                pin = self.pin and not (self.finish and self.pipeline.steps)  # an augmented batch is a new one
                self.stored = self._empty(x, pin), self._empty(y, pin)
        rows = slice(offset, offset + trees.length(x))
        for whole, piece in zip(self.stored, (x, y), strict=True):
            for tensor, part in zip(trees.leaves(whole), trees.leaves(piece), strict=True):
                tensor[rows] = part
        return self.stored

    def _empty(self, piece: Tree, pin: bool) -> Tree:
        """Allocate the whole batch of a piece."""
        n = len(self.indices)
        return trees.map_tensors(lambda t: torch.empty((n, *t.shape[1:]), dtype=t.dtype, pin_memory=pin), piece)


def pinned(tree: Tree) -> Tree:
    """Return the tree in pinned memory."""
    return trees.map_tensors(lambda tensor: tensor.pin_memory(), tree)
