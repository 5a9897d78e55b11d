"""loader=workers: torch's DataLoader."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from operator import length_hint
from types import TracebackType
from typing import IO, Any

from drivetrain.core.errors import DataError, Interrupted
from drivetrain.core.lazy import torch
from drivetrain.core.machine.forking import disown_garbage, end_with_run, parent_pid
from drivetrain.core.machine.open_files import apart_after_fork
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.options.option import Count, NonNegative
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.tensors import has_streams
from drivetrain.core.step.trees import Tree
from drivetrain.loader.base import Ahead, Batch, Loader, Pipeline, ReadBatch, reading_advice, timeout_error

DEATH_NOTICE_S = 10.0  # between a broken connection and the worker's end
GRACE_S = 2.0  # to transfer a batch after its announcement
WATCH_S = 0.25  # between two checks of the workers
STACK_WAIT_S = 1.0  # for the stack of a stuck worker
STACK_SIGNAL = signal.SIGUSR2  # makes a worker write its stack

logger = logging.getLogger(__name__)


class Workers(Loader):
    """torch's DataLoader with its usual settings: worker processes, pinned memory, prefetching.

    One iterator serves the whole run, so persistent workers read the next epoch while this one still trains.
    """

    effect = "exact"

    def __init__(
        self,
        num_workers: Count = 2,
        pin_memory: bool = True,
        prefetch_factor: Ahead = 2,
        persistent_workers: bool = True,
        non_blocking: bool = True,
        timeout_s: NonNegative = 120.0,
    ) -> None:
        self.num_workers, self.pin_memory, self.prefetch_factor = num_workers, pin_memory, prefetch_factor
        self.persistent_workers, self.non_blocking, self.timeout_s = persistent_workers, non_blocking, timeout_s

    def readers(self) -> tuple[str, str, int]:
        return "processes", "loader.num_workers", self.num_workers

    def copies_ahead(self) -> int:
        return int(self.pin_memory and self.non_blocking)

    def refusal(self, pipeline: Pipeline) -> str | None:
        if problem := super().refusal(pipeline):
            return problem
        problem = None if pipeline.own_code is None else pipeline.own_code.unshareable(threads=False)
        return problem and f"{problem}, or set loader=sync"

    def advice(self, pipeline: Pipeline) -> str | None:
        return reading_advice(pipeline, "loader.num_workers", self.num_workers)

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[ReadBatch]:
        from torch.utils.data import DataLoader

        if not (num_workers := min(self.num_workers, length_hint(requests, self.num_workers))):  # an evaluation has few requests
            return
        pending: deque[Request] = deque()  # asked for and not delivered yet

        def sampled() -> Iterator[Request]:
            for request in requests:
                pending.append(request)
                yield request
                if request.epoch_end and not self.persistent_workers:
                    return

        more, stacks = True, tempfile.TemporaryFile()  # noqa: SIM115 - closed with its last user
        while more:
            dataset: Any = _RequestDataset(pipeline.__call__ if finish else pipeline.read)
            loader: Any = DataLoader(
                dataset,
                sampler=_IteratorSampler(sampled()),
                batch_size=None,
                num_workers=num_workers,
                pin_memory=self.pin_memory and has_streams(device),
                prefetch_factor=self.prefetch_factor,
                timeout=WATCH_S,  # `_WaitLimit` asks again until timeout_s
                worker_init_fn=partial(_begin_worker, stacks),
                generator=torch.Generator(),  # else it draws its base seed from the model's random stream
            )
            more = False
            for delivery in self._deliveries(loader, pipeline, pending, stacks):
                request = pending.popleft()
                request.seconds, request.ready = delivery.seconds, delivery.ready
                more = request.epoch_end and not self.persistent_workers
                yield delivery.x, delivery.y, request

    def _deliveries(
        self, loader: Iterable[object], pipeline: Pipeline, pending: deque[Request], stacks: IO[bytes]
    ) -> Iterator[_Delivery]:
        """Yield the workers' batches. A stuck or killed worker ends the run as interrupted, so it can be resumed."""
        delivered = 0

        def too_late() -> Interrupted:
            limit.end()
            worker = f"loader worker {delivered % limit.workers + 1} of {limit.workers}"  # they take turns
            return timeout_error(worker, self.timeout_s, pipeline, int(pending[0].indices[0]))

        with _sigterm_blocked(), apart_after_fork():
            batches = _start(loader)
        try:
            with _WaitLimit(self.timeout_s, batches, stacks) as limit:
                for fetched in limit.each(batches):
                    if isinstance(fetched, DataError):
                        raise fetched
                    yield fetched
                    delivered += 1
        except RuntimeError as error:
            if limit.exceeded:
                raise too_late() from None
            self.raise_if_worker_died(error)
            raise
        except (OSError, EOFError) as error:
            if limit.exceeded:
                raise too_late() from None
            if (dead := limit.dead_worker()) is not None:  # the connection breaks first
                self.raise_if_worker_died(RuntimeError(f"DataLoader worker (pid {dead.pid}) ended, exit code {dead.exitcode}"))
            raise error

    def raise_if_worker_died(self, error: RuntimeError) -> None:
        if str(error).startswith("DataLoader worker"):  # killed or exited
            raise Interrupted(
                f"a loader's worker was killed ({str(error).strip().splitlines()[0]}); if memory ran out, lower "
                "loader.num_workers or set loader=threads"
            ) from None


class _WaitLimit:
    """Ends the wait for a batch after `timeout_s`, or when a worker has ended. A stopping run waits only briefly.

    Every WATCH_S torch's iterator times out and checks whether a worker has ended. torch's signal handler would raise anywhere in
    this process, also in a destructor, where Python prints a traceback and continues. So it watches none of our workers.

    A worker that stops after announcing a batch never hands over its memory, and torch waits without a limit. A thread ends the
    workers then.
    """

    def __init__(self, timeout_s: float, batches: Any, stacks: IO[bytes]) -> None:
        self.timeout_s, self.exceeded, self._stacks = timeout_s, False, stacks
        self._batches = batches
        self._workers: Sequence[BaseProcess] = getattr(batches, "_workers", [])
        self.workers = len(self._workers)
        self._waits_since: float | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="loader wait limit")

    def each(self, batches: Iterator[object]) -> Iterator[Any]:
        """Yield the batches, and record when the wait for each began."""
        while True:
            self._waits_since = time.monotonic()
            try:
                batch = self._next(batches)
            except StopIteration:
                return
            finally:
                self._waits_since = None
            yield batch

    def _next(self, batches: Iterator[object]) -> object:
        while True:
            try:
                return next(batches)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
                self.exceeded = self.exceeded or self._is_over(0)
                if self.exceeded:
                    raise

    def _is_over(self, grace: float) -> bool:
        since, limit = self._waits_since, self.timeout_s + grace if self.timeout_s else math.inf
        return since is not None and (time.monotonic() - since > limit or StopFlag.waited_long_enough(since, grace))

    def __enter__(self) -> _WaitLimit:
        if self._workers:
            self.forget()
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._workers:
            self._thread.join()  # it holds torch's iterator, whose destructor ends the workers

    def _watch(self) -> None:
        while not self._done.wait(WATCH_S):
            if self._is_over(GRACE_S):
                self.exceeded = True
                logger.warning("a loader's worker has announced a batch but does not hand it over")
                self.end()
                return

    def dead_worker(self) -> BaseProcess | None:
        """Return a worker that has ended, or ends within a few seconds; None if none does."""
        until = time.monotonic() + DEATH_NOTICE_S
        while time.monotonic() < until:
            for worker in self._workers:
                if not worker.is_alive():
                    return worker
            time.sleep(0.01)
        return None

    def end(self) -> None:
        """Kill the workers and log their stacks. A stopped worker answers no other signal: we would wait for it."""
        for worker in self._workers:
            if worker.pid is not None and worker.is_alive() and not StopFlag.told_to_stop():
                os.kill(worker.pid, STACK_SIGNAL)
        until, length = time.monotonic() + STACK_WAIT_S, -1
        while length in (-1, 0) or length < os.fstat(self._stacks.fileno()).st_size:  # a stack is written in parts
            length = os.fstat(self._stacks.fileno()).st_size
            if time.monotonic() > until or StopFlag.told_to_stop():
                break
            time.sleep(0.05)
        for worker in self._workers:
            worker.kill()
        self._stacks.seek(0)
        if stacks := self._stacks.read().decode(errors="replace"):
            logger.warning("where the loader's workers were:\n%s", stacks.rstrip())

    def forget(self) -> None:
        """Keep torch's signal handler from raising the end of these workers."""
        from torch.utils.data._utils import signal_handling

        while getattr(self._batches, "_worker_pids_set", False):
            with suppress(RuntimeError):  # the handler may raise here too
                signal_handling._remove_worker_pids(id(self._batches))
                self._batches._worker_pids_set = False


@dataclass(slots=True)
class _Delivery:
    """A worker's batch. torch's DataLoader passes this class through unchanged, but would turn tuples into lists, twice."""

    x: Tree
    y: Tree
    seconds: float
    ready: float

    def pin_memory(self) -> _Delivery:
        """Move the batch to page-locked memory. The DataLoader's thread calls it."""
        self.x, self.y = (trees.map_tensors(lambda tensor: tensor.pin_memory(), tree) for tree in (self.x, self.y))
        return self


class _RequestDataset:
    """A map-style dataset whose key is a request and whose value is the whole micro-batch."""

    def __init__(self, work: Callable[[Request], Batch]) -> None:
        self.work = work

    def __getitem__(self, request: Request) -> _Delivery | DataError:
        began = time.perf_counter()
        try:
            x, y = self.work(request)
            for tensor in (*trees.leaves(x), *trees.leaves(y)):  # in the queue's thread, where torch does it, errors are dropped
                tensor.share_memory_()
            ready = time.perf_counter()
            return _Delivery(x, y, ready - began, ready)
        except DataError as error:  # raised in the parent: torch would wrap the worker's traceback around it
            return error


class _IteratorSampler:
    """An iterator as a sampler."""

    def __init__(self, keys: Iterator[Request]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Request]:
        return self.keys


def _start(loader: Iterable[object]) -> Any:
    """Start the workers. Raises OSError if the machine lacks room; the failing destructor of torch's iterator is muted."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        return iter(loader)
    except OSError as error:
        raise error.with_traceback(None) from None  # its frames hold the iterator, whose destructor fails
    finally:
        sys.unraisablehook = before


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Block SIGTERM in this thread during the context. Processes that it forks meanwhile keep it blocked."""
    if not hasattr(signal, "sigtimedwait"):  # on a Mac
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(stacks: IO[bytes], _: int) -> None:
    """Set up a worker's process: it ends with the run, not before. On STACK_SIGNAL it writes its stack to `stacks`."""
    disown_garbage()
    torch.set_num_threads(1)  # the workers share the cores already
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, EOFError | ConnectionError):  # the run was killed: nobody reads this
            before(kind, error, trace)

    sys.excepthook = hook
    threading.Thread(target=end_with_run, args=(parent_pid(),), daemon=True, name="end with run").start()
