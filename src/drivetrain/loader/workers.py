"""torch's DataLoader."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from drivetrain.core.errors import DataError, Interrupted
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import Count, NonNegative
from drivetrain.loader.base import Loader, Pipeline, quicker_reading, too_late

LAST_WORD = 1.0  # seconds from a broken connection to the news that its worker was killed


class Workers(Loader):
    """torch's DataLoader with worker processes, pinned memory and prefetching: the five knobs everybody tunes.

    One iterator serves the whole run, so persistent workers fetch the next epoch while this one still trains.
    """

    def __init__(
        self,
        num_workers: Count = 2,
        pin_memory: bool = True,
        prefetch_factor: Count = 2,
        persistent_workers: bool = True,
        non_blocking: bool = True,
        timeout_s: NonNegative = 120.0,
    ) -> None:
        self.num_workers, self.pin_memory, self.prefetch_factor = num_workers, pin_memory, prefetch_factor
        self.persistent_workers, self.non_blocking, self.timeout_s = persistent_workers, non_blocking, timeout_s

    def faster(self, pipeline: Pipeline) -> str | None:
        return quicker_reading(pipeline, "loader.num_workers", self.num_workers)

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[tuple[Any, Any, Request]]:
        from torch.utils.data import DataLoader

        waiting: deque[Request] = deque()  # what has been asked for and not come yet

        def keys() -> Iterator[Request]:
            for request in requests:
                waiting.append(request)
                yield request
                if request.epoch_end and not self.persistent_workers:
                    return

        more = True
        while more:
            dataset: Any = _Fetch(pipeline.__call__ if finish else pipeline.read)
            loader: Any = DataLoader(
                dataset,
                sampler=_Once(keys()),
                batch_size=None,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory and device.type == "cuda",
                prefetch_factor=self.prefetch_factor,
                timeout=self.timeout_s,
                worker_init_fn=_one_thread,
                generator=torch.Generator(),  # else it draws its base seed from the model's own stream
            )
            more = False
            for x, y, seconds, ready in self._errors_named(loader, pipeline, waiting):
                request = waiting.popleft()
                request.seconds, request.ready = seconds, ready
                more = request.epoch_end and not self.persistent_workers
                yield x, y, request

    def _errors_named(self, loader: Iterable[Any], pipeline: Pipeline, waiting: deque[Request]) -> Iterator[Any]:
        """What the workers deliver; one that is stuck or killed ends the run, to be gone on with."""
        delivered = 0
        try:
            for fetched in loader:
                if isinstance(fetched, DataError):
                    raise fetched
                yield fetched
                delivered += 1
        except RuntimeError as error:
            if "timed out" in str(error):  # they take turns
                who = f"loader worker {delivered % self.num_workers + 1} of {self.num_workers}"
                raise too_late(who, self.timeout_s, pipeline, int(waiting[0].indices[0])) from None
            self.explain(error)
            raise
        except (OSError, EOFError) as error:
            try:  # a connection breaks before its worker is known to be dead, which torch's handler then tells wherever we are
                time.sleep(LAST_WORD)
            except RuntimeError as death:
                self.explain(death)
            raise error

    def explain(self, error: RuntimeError) -> None:
        if str(error).startswith("DataLoader worker"):  # killed, or gone
            raise Interrupted(
                f"a loader's worker was killed ({str(error).strip().splitlines()[0]}); where memory ran out, lower "
                "loader.num_workers or set loader=threads"
            ) from None


class _Fetch:
    """The work as a map-style dataset whose key is a whole micro-batch."""

    def __init__(self, work: Callable[[Request], Any]) -> None:
        self.work = work

    def __getitem__(self, request: Request) -> Any:
        began = time.perf_counter()
        try:
            x, y = self.work(request)
            ready = time.perf_counter()
            return x, y, ready - began, ready
        except DataError as error:  # raised in the parent: torch would wrap the worker's traceback around it
            return error


class _Once:
    """An iterator as a sampler."""

    def __init__(self, keys: Iterator[Any]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Any]:
        return self.keys


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)  # the cores are shared out among the workers already
