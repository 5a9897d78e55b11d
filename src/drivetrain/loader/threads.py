"""Threads that read ahead: decoding releases the interpreter's lock, and what they read needs no copy between processes."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Literal

from drivetrain.core.cpus import usable_cores
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import Count, Positive
from drivetrain.loader.base import Batch, Loader, Pipeline, quicker_reading, too_late

LAST_JOB = 1.0  # seconds that a thread has to end what it does
PIECES = 2  # of a batch, for each thread: small enough that all finish together


class Threads(Loader):
    """Batches are read ahead by threads of this process; each batch's samples are shared out among them.

    A source says by `parallel_read` that reading one sample is work (decoding); others are read a batch at a time.
    """

    non_blocking = True

    def __init__(
        self,
        num_threads: Count | Literal["auto"] = "auto",
        prefetch_factor: Count = 2,
        pin_memory: bool = True,
        timeout_s: Positive = 120.0,
    ) -> None:
        self.num_threads, self.prefetch_factor = num_threads, prefetch_factor
        self.pin_memory, self.timeout_s = pin_memory, timeout_s

    def faster(self, pipeline: Pipeline) -> str | None:
        return quicker_reading(pipeline, "loader.num_threads", self.threads())

    def threads(self) -> int:
        """How many: this rank's share of the cores it may use."""
        return usable_cores() if self.num_threads == "auto" else self.num_threads

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[tuple[Any, Any, Request]]:
        waiting: deque[Shared] = deque()
        wanted = iter(requests)
        pin = self.pin_memory and device.type == "cuda"
        pool = Pool(self.threads())
        try:
            while True:
                while len(waiting) <= self.prefetch_factor and (request := next(wanted, None)) is not None:
                    waiting.append(Shared(pipeline, request, finish, self.threads(), pin))
                    waiting[-1].start(pool)
                if not waiting:
                    return
                batch = waiting.popleft()
                yield *self._arrived(batch), batch.request
        finally:
            pool.close()
            for batch in waiting:
                batch.done.cancel()

    def _arrived(self, batch: Shared) -> Batch:
        try:
            return batch.done.result(self.timeout_s)
        except TimeoutError:
            who, row = next(iter(batch.reading.items()), ("every loader thread", int(batch.rows[0])))
            raise too_late(who, self.timeout_s, batch.pipeline, row) from None


class Pool:
    """Threads that do what they are given in its order. Daemons: one that is stuck in a read keeps no process alive."""

    def __init__(self, threads: int) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.closed = False
        names = (f"loader thread {n + 1} of {threads}" for n in range(threads))
        self.threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self.threads:
            thread.start()

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        """Give a job to whoever is free first."""
        self.jobs.put((job, args))

    def close(self) -> None:
        """Forget what has not begun, and wait for what has: an interpreter that ends amid a thread's C++ takes all down.

        One that is stuck is not waited for.
        """
        self.closed = True
        for _ in self.threads:
            self.jobs.put(None)
        deadline = time.monotonic() + LAST_JOB
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            if not self.closed:
                job[0](*job[1])


class Shared:
    """One batch that several threads read: each a run of its rows, straight into the batch; the last one finishes it."""

    def __init__(self, pipeline: Pipeline, request: Request, finish: bool, threads: int, pin: bool) -> None:
        self.pipeline, self.request, self.finish, self.pin = pipeline, request, finish, pin
        self.rows = request.rows()
        alike = getattr(self.pipeline.source, "parallel_read", False)
        self.pieces = self.rows.tensor_split(min(len(self.rows), PIECES * threads)) if alike else (self.rows,)
        self.left = len(self.pieces)
        self.lock = threading.Lock()
        self.seconds = 0.0  # of all threads
        self.reading: dict[str, int] = {}  # which thread has begun with which sample and is not done
        self.x: Any = None
        self.y: Any = None
        self.done: Future[Batch] = Future()

    def start(self, pool: Pool) -> None:
        """Hand the pieces out; `done` is what the batch will be."""
        at = 0
        for piece in self.pieces:
            pool.submit(self._read, piece, at)
            at += len(piece)

    def _read(self, rows: Any, at: int) -> None:
        try:
            if self.done.done():  # another piece has failed
                return
            began = time.perf_counter()
            self.reading[who := threading.current_thread().name] = int(rows[0])
            x, y = self.pipeline.read_rows(rows, self.request)
            del self.reading[who]
            if len(self.pieces) == 1:
                self.x, self.y = (x.pin_memory(), y.pin_memory()) if self.pin else (x, y)
            else:
                with self.lock:
                    if self.x is None:
                        self.x = torch.empty((len(self.rows), *x.shape[1:]), dtype=x.dtype, pin_memory=self.pin)
                        self.y = torch.empty((len(self.rows), *y.shape[1:]), dtype=y.dtype, pin_memory=self.pin)
                self.x[at : at + len(rows)] = x
                self.y[at : at + len(rows)] = y
            with self.lock:
                self.left -= 1
                last = self.left == 0
                self.seconds += time.perf_counter() - began
            if last:
                began = time.perf_counter()
                batch = self.pipeline.finish(self.x, self.y, self.request) if self.finish else (self.x, self.y)
                self.request.ready = time.perf_counter()
                self.request.seconds = self.seconds + self.request.ready - began
                self.done.set_result(batch)
        except BaseException as error:  # it belongs to whoever waits for the batch
            with self.lock:
                if not self.done.done():
                    self.done.set_exception(error)
