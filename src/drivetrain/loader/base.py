"""Every loader yields the same micro-batches in the same order; loader=sync is the plainest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from drivetrain.core.cpus import usable_cores
from drivetrain.core.errors import Interrupted
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.option import Option, RunSpec

Batch = tuple[Any, Any]  # inputs and targets


class Pipeline(NamedTuple):
    """What happens to a request's samples: `read` on the CPU, `finish` there or on the device. Picklable, for workers."""

    source: Any
    steps: tuple[Any, ...]  # augmentations in their order
    normalize: Any  # None where the source's values are ready
    seed: int
    classes: int = 0
    pad_to: int = 1  # sequences are padded to a multiple of this

    def read(self, request: Request) -> Batch:
        """Inputs and targets as they lie in the source: those of `request.rows()`."""
        return self.read_rows(request.rows(), request)

    def read_rows(self, rows: torch.Tensor, request: Request) -> Batch:
        """Some of the request's rows alone; a source that can takes the first step's crops while it decodes."""
        if self.pad_to > 1:
            return self.source.fetch(rows, self.pad_to)
        boxes = self.boxes(rows, request)
        return self.source.fetch(rows) if boxes is None else self.source.fetch(rows, boxes)

    def boxes(self, rows: torch.Tensor, request: Request) -> Any:
        """What a source that crops is to cut out of each of the rows, if anything."""
        crops = self.steps and getattr(self.source, "crops", False)
        return self.steps[0].boxes(self.seed, request.epoch, rows) if crops else None

    def finish(self, x: torch.Tensor, y: torch.Tensor, request: Request) -> Batch:
        """What `read` gave, augmented, mixed and normalised, on whatever device it is on."""
        if self.steps:
            rows = request.rows().to(x.device, non_blocking=True)
            for step in self.steps:
                x, y, rows = step.apply(x, y, rows, self, request)
        return (x if self.normalize is None else self.normalize(x)), y

    def __call__(self, request: Request) -> Batch:
        """Inputs and targets that training takes."""
        return self.finish(*self.read(request), request)


class Loader(Option):
    """loader=sync: the loop fetches each batch itself, as torch's DataLoader does by default."""

    pin_memory = False
    non_blocking = False

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.data.on_device and type(self) is not Loader:
            yield f"{run.named('loader')} has nothing to do for {run.named('data')}, which is made on the device: set loader=sync"

    def autotune(self, pipeline: Pipeline, size: int, device: torch.device) -> list[str]:
        """Decide what needs measuring, on micro-batches of `size`, before training starts; what was decided, a line each."""
        return []

    def explain(self, error: RuntimeError) -> None:
        """Raise Interrupted if this came from losing a reader: torch raises that wherever the run is at the moment."""

    def faster(self, pipeline: Pipeline) -> str | None:
        """What helps where the device waits for this loader's data, as overrides with their reason; None: nothing we know."""
        return "loader=threads reads ahead while the device works"

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Iterator[MicroBatch]:
        """The micro-batches of `requests`, in their order, on the device."""
        for x, y, request in self.batches(pipeline, requests, device):
            yield self.micro(x, y, request, device, memory_format)

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[tuple[Any, Any, Request]]:
        """Each request's batch, in their order, on the CPU or where the source is; as read where it is not to be finished."""
        work = pipeline if finish else pipeline.read
        for request in requests:
            began = time.perf_counter()
            x, y = work(request)
            request.ready = time.perf_counter()
            request.seconds = request.ready - began
            yield x, y, request

    def micro(self, x: Any, y: Any, request: Request, device: torch.device, memory_format: torch.memory_format) -> MicroBatch:
        """A batch, brought to the device."""
        x = x.to(device, non_blocking=self.non_blocking, memory_format=memory_format)
        y = y.to(device, non_blocking=self.non_blocking)
        return MicroBatch(x, y, request.weight, request.last, request.epoch_end, request.seconds, request.ready)


def too_late(who: str, seconds: float, pipeline: Pipeline, index: int) -> Interrupted:
    """The end of a run whose data does not come: who has delivered nothing for so long, and what it reads."""
    name = getattr(pipeline.source, "name", None)
    sample = name(index) if callable(name) else f"sample {index}"
    return Interrupted(
        f"{who} has delivered nothing for {seconds:g} s (loader.timeout_s), of a batch that begins with {sample}: "
        "a stuck read, or too slow a disk"
    )


def quicker_reading(pipeline: Pipeline, knob: str = "", readers: int | None = None) -> str | None:
    """What helps a loader that reads ahead already: more `readers`, set by `knob`, if there are cores for them; less to read."""
    cores = usable_cores()
    helps = [f"{knob}={cores}, one for each core"] if readers is not None and readers < cores else []
    if hasattr(pipeline.source, "undecoded"):
        helps.append("data=packed reads what `drivetrain pack` has decoded once")
    return ", or ".join(helps) or None
