"""loader=auto: measures the loaders on this machine, data and batch, and takes the best."""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections.abc import Iterable
from typing import NamedTuple

from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import synchronize
from drivetrain.core.machine.guards import usable_cores
from drivetrain.core.options.option import Positive
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.step import Stream
from drivetrain.core.step.tensors import Tensors
from drivetrain.core.typed import StateDict
from drivetrain.loader.base import Loader, Pipeline, reading_advice
from drivetrain.loader.device import DeviceLoader, Resident, free_memory
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers

logger = logging.getLogger(__name__)


class Cost(NamedTuple):
    """Seconds to start, and seconds per step."""

    start: float
    step: float

    def of(self, steps: float) -> float:
        """Seconds for a number of steps, including the start."""
        return self.start + steps * self.step

    def pays_after(self, base: Cost) -> int | None:
        """The break-even number of steps, from which on it is faster than `base`; None: it never is."""
        saved = base.step - self.step
        return max(0, math.ceil((self.start - base.start) / saved)) if saved > 0 else None


SIMPLEST = "loader=sync"
TIE = 0.95  # tolerance above the least cost, within which the simplest loader is chosen
ROUNDS = 3
SHARE = 0.2  # share of the run's time with loader=sync that measuring the others may take


class AutoLoader(Loader):
    """Each loader reads the same batches, in turns. The fastest for the whole run is chosen; of equally fast ones, the simplest.

    A run's time is the loader's start plus all batches, so a short run prefers a loader that starts at once. On a device, time
    is wall time. On a CPU the step needs the cores too, so time is core-seconds, or wall time while nothing runs. Measuring
    ends after a fifth of loader=sync's time for the run; otherwise it completes the first round, and further rounds end after
    `budget_s` seconds.
    """

    effect = "close"
    changes = "samples may be augmented on the device, which rounds differently"

    def __init__(self, budget_s: Positive = 5.0) -> None:
        self.budget_s = budget_s
        self._loaders: dict[str, Loader] = {SIMPLEST: Loader()}
        self._name = SIMPLEST

    @property
    def _chosen(self) -> Loader:
        return self._loaders[self._name]

    def state_dict(self) -> StateDict:
        return {"chosen": self._name}

    def load_state_dict(self, state: StateDict) -> None:
        """Keep the run's first loader if the other would augment on another device, which rounds differently."""
        before = self._loaders.get(str(state.get("chosen")), self._chosen)
        if before.augments_on_device != self._chosen.augments_on_device:
            self._name = str(state["chosen"])
            logger.info(f"loader=auto keeps the run's first loader, {self._name}, so that samples stay the same")

    def raise_if_worker_died(self, error: RuntimeError) -> None:
        self._chosen.raise_if_worker_died(error)

    def advice(self, pipeline: Pipeline) -> str | None:
        return reading_advice(pipeline)

    def refusal(self, pipeline: Pipeline) -> str | None:
        return self._chosen.refusal(pipeline)

    def candidates(self, pipeline: Pipeline, device: torch.device) -> dict[str, Loader]:
        """Return the loaders to measure, the simplest first, by the overrides that choose them."""
        cores = usable_cores()
        counts = sorted({1, max(1, cores // 2), cores})
        found: dict[str, Loader] = {SIMPLEST: Loader()}
        found |= {f"loader=threads loader.num_threads={n}": Threads(n) for n in counts}
        found |= {f"loader=workers loader.num_workers={n}": Workers(n) for n in counts}
        if device.type != "cpu":
            found |= {f"loader=device loader.num_readers={n}": DeviceLoader("threads", n) for n in counts}
            if isinstance(pipeline.source, Tensors) and pipeline.source.nbytes() < 0.5 * (free_memory(device) or 0):
                found |= {"loader=resident": Resident()}
        return found

    def autotune(self, pipeline: Pipeline, size: int, batches: int, device: torch.device) -> list[str]:
        candidates = self.candidates(pipeline, device).items()
        self._loaders = {name: loader for name, loader in candidates if loader.refusal(pipeline) is None}
        costs = self._measured(CostPerBatch(pipeline, size, device), batches)
        seconds = {name: statistics.median(cost.of(batches) for cost in found) for name, found in costs.items()}
        least = min(seconds.values())
        chosen = self._name = next(name for name, s in seconds.items() if s * TIE <= least)
        said = f"loader=auto took {chosen} for {batches:,} batches of {size}"
        if len(seconds) == 1:
            return [f"{said}: it reads them in about {least:,.2g} s, so measuring the others would not pay off"]
        others = ", ".join(f"{_short(name)} {seconds[chosen] / s:.2f}" for name, s in seconds.items() if name != chosen)
        unit = "samples/s" if device.type != "cpu" else "samples per second of cores and waits"
        speed = size * batches / seconds[chosen]
        return [f"{said}: {speed:,.0f} {unit}, its start included (others, relative to it: {others})"]

    def _measured(self, cost: CostPerBatch, batches: int) -> dict[str, list[Cost]]:
        """Measure the loaders in turns, the simplest first, as long as that can pay off."""
        costs: dict[str, list[Cost]] = {}
        began, pays = time.perf_counter(), math.inf
        for turn in range(ROUNDS):
            for name, loader in self._loaders.items():
                spent = time.perf_counter() - began
                if spent > pays or (turn and spent > self.budget_s):
                    return costs
                costs.setdefault(name, []).append(cost.measure(loader))
                if pays == math.inf:
                    pays = SHARE * costs[name][0].of(batches)
        return costs

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Stream:
        yield from self._chosen.stream(pipeline, requests, device, memory_format)


def _short(overrides: str) -> str:
    """Shorten loader=threads loader.num_threads=2 to threads(2)."""
    return re.sub(r" \S+=(\d+)", r"(\1)", overrides.removeprefix("loader="))


class CostPerBatch:
    """Measures a loader's cost: wall time on a device, else CPU time of this process and its children, plus all waits.

    A wait is wall time in which none of them ran, for instance until a disk or a server answers. Time lost to other programs is
    not a wait.
    """

    def __init__(self, pipeline: Pipeline, size: int, device: torch.device, batches: int = 4) -> None:
        self.pipeline, self.device, self.batches = pipeline, device, batches
        n = len(pipeline.source)
        self.requests = [Request(0, (torch.arange(size) + i * size) % n, 1.0) for i in range(batches + 1)]
        pipeline(self.requests[0])  # one-time costs of the very first read belong to no loader

    def measure(self, loader: Loader) -> Cost:
        """Measure one loader: it reads one batch and then, after a restart, several more."""
        both = zip(self._took(loader, 1), self._took(loader, self.batches + 1), strict=True)
        of_clocks = [(first, max(0.0, of_all - first) / self.batches) for first, of_all in both]
        return Cost(max(0.0, *(first - batch for first, batch in of_clocks)), max(batch for _, batch in of_clocks))

    def _took(self, loader: Loader, batches: int) -> list[float]:
        """Return the seconds of each clock."""
        began = self._clocks()
        for _ in loader.stream(self.pipeline, self.requests[:batches], self.device, torch.contiguous_format):
            pass
        synchronize(self.device)
        return [now - then for now, then in zip(self._clocks(), began, strict=True)]

    def _clocks(self) -> tuple[float, ...]:
        """Return wall time; on a CPU, wall time less this thread's waits for a core, and the processor time of all."""
        if self.device.type != "cpu":
            return (time.perf_counter(),)
        import resource

        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.perf_counter() - _delayed(), sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _delayed() -> float:
    """Return this thread's waits for a core so far, in seconds; 0 if the system does not report them."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
