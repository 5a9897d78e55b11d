"""Reading on the CPU, everything else on the device: the copy, augmentation and normalisation run ahead on a side stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.option import Count
from drivetrain.loader.base import Loader, Pipeline, quicker_reading
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers


class Device(Loader):
    """Raw samples (uint8) go to the device ahead of the step and are augmented and normalised there, a batch at a time.

    `reader` is who reads them on the CPU. Without CUDA the same happens in turn, in the loop's own thread.
    """

    non_blocking = True

    def __init__(
        self,
        reader: Literal["sync", "workers", "threads"] = "threads",
        num_readers: Count | Literal["auto"] = "auto",
        prefetch_factor: Count = 2,
        ahead: Count = 1,
    ) -> None:
        self.reader, self.num_readers, self.prefetch_factor, self.ahead = reader, num_readers, prefetch_factor, ahead

    def explain(self, error: RuntimeError) -> None:
        self._reads().explain(error)

    def faster(self, pipeline: Pipeline) -> str | None:
        if self.reader == "sync":
            return "loader.reader=threads reads ahead while the device works"
        return quicker_reading(pipeline, "loader.num_readers", Threads(self.num_readers).threads())

    def _reads(self) -> Loader:
        threads = Threads(self.num_readers, self.prefetch_factor)
        if self.reader == "workers":
            return Workers(threads.threads(), prefetch_factor=self.prefetch_factor)
        return threads if self.reader == "threads" else Loader()

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Iterator[MicroBatch]:
        read = self._reads().batches(pipeline, requests, device, finish=False)
        if device.type != "cuda":
            for x, y, request in read:
                yield self._finished(pipeline, x, y, request, device, memory_format)
            return
        yield from Ahead(self, pipeline, device, memory_format).run(read)

    def _finished(self, pipeline: Pipeline, x: Any, y: Any, request: Request, device: Any, memory_format: Any) -> MicroBatch:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        return self.micro(*pipeline.finish(x, y, request), request, device, memory_format)


class Ahead:
    """A few batches on their way through the side stream while the step runs on the main one."""

    def __init__(self, loader: Device, pipeline: Pipeline, device: Any, memory_format: Any) -> None:
        self.loader, self.pipeline, self.device, self.memory_format = loader, pipeline, device, memory_format
        self.side = torch.cuda.Stream(device)

    def run(self, read: Iterator[tuple[Any, Any, Request]]) -> Iterator[MicroBatch]:
        """The micro-batches, each `ahead` batches before it is wanted."""
        waiting: list[tuple[MicroBatch, Any, Any]] = []
        for x, y, request in read:
            waiting.append(self._begun(x, y, request))
            if len(waiting) > self.loader.ahead:
                yield self._ready(*waiting.pop(0))
        for begun in waiting:
            yield self._ready(*begun)

    def _begun(self, x: Any, y: Any, request: Request) -> tuple[MicroBatch, Any, Any]:
        with torch.cuda.stream(self.side):
            micro = self.loader._finished(self.pipeline, x, y, request, self.device, self.memory_format)
            event = torch.cuda.Event()
            event.record(self.side)
        return micro, event, (x, y)  # the pinned memory must live until the copy is through

    def _ready(self, micro: MicroBatch, event: Any, raw: Any) -> MicroBatch:
        main = torch.cuda.current_stream(self.device)
        main.wait_event(event)
        for tensor in (micro.x, micro.y):  # the allocator must not give the memory away while the step reads it
            tensor.record_stream(main)
        return micro
