"""loader=auto: measures the loaders on this machine, this data and this batch, and takes the best."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Iterator

from drivetrain.core.cpus import usable_cores
from drivetrain.core.device import synchronize
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.option import Positive
from drivetrain.core.tensors import Tensors
from drivetrain.loader.base import Loader, Pipeline, reading_advice
from drivetrain.loader.device import Device
from drivetrain.loader.resident import Resident, free_memory
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers

TIE = 0.95  # of the best speed: the simplest loader that reaches this is chosen
ROUNDS = 3


class Auto(Loader):
    """Each loader reads the same batches, in turns, and the fastest is chosen; of equally fast ones, the simplest.

    On a device the fastest has the shortest wall time. On a CPU the step needs the cores too, so the fastest takes the fewest
    core-seconds. The first round always runs; the others stop after `budget_s` seconds.
    """

    effect = "close"
    changes = "samples may be augmented on the device, which rounds otherwise"

    def __init__(self, budget_s: Positive = 5.0) -> None:
        self.budget_s = budget_s
        self._chosen: Loader = Loader()

    def raise_if_worker_died(self, error: RuntimeError) -> None:
        self._chosen.raise_if_worker_died(error)

    def advice(self, pipeline: Pipeline) -> str | None:
        return reading_advice(pipeline)

    def candidates(self, pipeline: Pipeline, device: torch.device) -> dict[str, Loader]:
        """Return the loaders to measure, the simplest first, by the overrides that choose them."""
        cores = usable_cores()
        counts = sorted({1, max(1, cores // 2), cores})
        found: dict[str, Loader] = {"loader=sync": Loader()}
        found |= {f"loader=threads loader.num_threads={n}": Threads(n) for n in counts}
        found |= {f"loader=workers loader.num_workers={n}": Workers(n) for n in counts}
        if device.type != "cpu":
            found |= {f"loader=device loader.num_readers={n}": Device("threads", n) for n in counts}
            if isinstance(pipeline.source, Tensors) and pipeline.source.nbytes() < 0.5 * (free_memory(device) or 0):
                found |= {"loader=resident": Resident()}
        return found

    def autotune(self, pipeline: Pipeline, size: int, device: torch.device) -> list[str]:
        began, cost = time.perf_counter(), CostPerBatch(pipeline, size, device)
        loaders = self.candidates(pipeline, device)
        costs: dict[str, list[float]] = {name: [] for name in loaders}
        for turn in range(ROUNDS):
            for name, loader in loaders.items():
                if turn and time.perf_counter() - began > self.budget_s:
                    break
                costs[name].append(cost.measure(loader))
        seconds = {name: statistics.median(values) for name, values in costs.items() if values}
        least = min(seconds.values())
        chosen = next(name for name, s in seconds.items() if s * TIE <= least)
        self._chosen = loaders[chosen]
        others = ", ".join(f"{_short(name)} {seconds[chosen] / s:.2f}" for name, s in seconds.items() if name != chosen)
        unit = "samples/s" if device.type != "cpu" else "samples per core-second"
        return [f"loader=auto took {chosen}: {size / seconds[chosen]:,.0f} {unit} (others, relative to it: {others})"]

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Iterator[MicroBatch]:
        yield from self._chosen.stream(pipeline, requests, device, memory_format)


def _short(overrides: str) -> str:
    """Shorten loader=threads loader.num_threads=2 to threads(2)."""
    return re.sub(r" \S+=(\d+)", r"(\1)", overrides.removeprefix("loader="))


class CostPerBatch:
    """Measures seconds per batch: wall time on a device, else CPU time of this process and its children."""

    def __init__(self, pipeline: Pipeline, size: int, device: torch.device, batches: int = 4) -> None:
        self.pipeline, self.device, self.batches = pipeline, device, batches
        n = len(pipeline.source)
        self.requests = [Request(0, (torch.arange(size) + i * size) % n, 1.0) for i in range(batches + 1)]

    def measure(self, loader: Loader) -> float:
        """Measure one loader. The first batch, which starts it, is not counted."""
        stream = loader.stream(self.pipeline, self.requests, self.device, torch.contiguous_format)
        next(stream)
        began = self._clock()
        for _ in stream:
            pass
        synchronize(self.device)
        return (self._clock() - began) / self.batches

    def _clock(self) -> float:
        if self.device.type != "cpu":
            return time.perf_counter()
        import resource

        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)
