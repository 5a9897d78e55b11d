"""The loader that measures best on this machine, this data and this batch."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

from drivetrain.core.cpus import usable_cores
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.option import Positive
from drivetrain.core.tensors import Tensors
from drivetrain.loader.base import Loader, Pipeline, quicker_reading
from drivetrain.loader.device import Device
from drivetrain.loader.resident import Resident, free_memory
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers

CLOSE = 0.95  # of the best: then the simpler one is taken
ROUNDS = 3


class Auto(Loader):
    """Every loader reads the same batches for a moment, in turns, and the best one is kept: simplest first where they tie.

    Where the device is CUDA the fastest is best. Where it is the CPU the step needs the cores too: best is what takes
    the fewest core-seconds. `budget_s` bounds the measuring.
    """

    def __init__(self, budget_s: Positive = 5.0) -> None:
        self.budget_s = budget_s
        self._kept: Loader = Loader()

    def explain(self, error: RuntimeError) -> None:
        self._kept.explain(error)

    def faster(self, pipeline: Pipeline) -> str | None:
        return quicker_reading(pipeline)

    def candidates(self, pipeline: Pipeline, device: torch.device) -> dict[str, Loader]:
        """What is tried, the simplest first, by the words that set it."""
        cores = usable_cores()
        counts = sorted({1, max(1, cores // 2), cores})
        found: dict[str, Loader] = {"loader=sync": Loader()}
        found |= {f"loader=threads loader.num_threads={n}": Threads(n) for n in counts}
        found |= {f"loader=workers loader.num_workers={n}": Workers(n) for n in counts}
        if device.type == "cuda":
            found |= {f"loader=device loader.num_readers={n}": Device("threads", n) for n in counts}
            if isinstance(pipeline.source, Tensors) and pipeline.source.x.nbytes < 0.5 * (free_memory(device) or 0):
                found |= {"loader=resident": Resident()}
        return found

    def autotune(self, pipeline: Pipeline, size: int, device: torch.device) -> list[str]:
        began, cost = time.perf_counter(), Cost(pipeline, size, device)
        tried = self.candidates(pipeline, device)
        found: dict[str, list[float]] = {name: [] for name in tried}
        for turn in range(ROUNDS):
            for name, loader in tried.items():
                if turn and time.perf_counter() - began > self.budget_s:
                    break
                found[name].append(cost.of(loader))
        seconds = {name: statistics.median(values) for name, values in found.items() if values}
        least = min(seconds.values())
        kept = next(name for name, s in seconds.items() if s * CLOSE <= least)
        self._kept = tried[kept]
        others = ", ".join(f"{_short(name)} {seconds[kept] / s:.2f}" for name, s in seconds.items() if name != kept)
        measure = "samples/s" if device.type == "cuda" else "samples per core-second"
        return [f"loader=auto took {kept}: {size / seconds[kept]:,.0f} {measure} (others, of that: {others})"]

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Iterator[MicroBatch]:
        yield from self._kept.stream(pipeline, requests, device, memory_format)


def _short(words: str) -> str:
    """loader=threads loader.num_threads=2 as threads(2)."""
    return re.sub(r" \S+=(\d+)", r"(\1)", words.removeprefix("loader="))


class Cost:
    """Seconds of one batch by a loader: the wall's on CUDA, all cores' of this process and its children on a CPU."""

    def __init__(self, pipeline: Pipeline, size: int, device: torch.device, batches: int = 4) -> None:
        self.pipeline, self.device, self.batches = pipeline, device, batches
        n, weight = len(pipeline.source), torch.ones(())
        self.requests = [Request(0, (torch.arange(size) + at * size) % n, weight) for at in range(batches + 1)]

    def of(self, loader: Loader) -> float:
        """Measure one loader: the first batch, which starts it, is not counted."""
        stream = loader.stream(self.pipeline, self.requests, self.device, torch.contiguous_format)
        next(stream)
        began = self._clock()
        for _ in stream:
            pass
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (self._clock() - began) / self.batches

    def _clock(self) -> float:
        if self.device.type == "cuda":
            return time.perf_counter()
        import resource

        used: list[Any] = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in used)
