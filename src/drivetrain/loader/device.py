"""loader=device: samples are read on the CPU, then copied, augmented and normalised on the device, ahead of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.option import Count
from drivetrain.loader.base import Batch, Loader, Pipeline, ReadBatch, reading_advice
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers


class Device(Loader):
    """Raw samples (uint8) are copied to the device ahead of the step, and augmented and normalised there in batches.

    `reader` is the loader that reads them on the CPU. Without CUDA the same steps run one after the other.
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

    def autotune(self, pipeline: Pipeline, size: int, device: torch.device) -> list[str]:
        on_cpu = "loader=device: the device is the CPU, so batches are prepared between the steps, not beside them"
        return [on_cpu] if device.type == "cpu" else []

    def raise_if_worker_died(self, error: RuntimeError) -> None:
        self._cpu_loader().raise_if_worker_died(error)

    def advice(self, pipeline: Pipeline) -> str | None:
        if self.reader == "sync":
            return "loader.reader=threads reads ahead while the device works"
        return reading_advice(pipeline, "loader.num_readers", Threads(self.num_readers).threads())

    def _cpu_loader(self) -> Loader:
        threads = Threads(self.num_readers, self.prefetch_factor)
        if self.reader == "workers":
            return Workers(threads.threads(), prefetch_factor=self.prefetch_factor)
        return threads if self.reader == "threads" else Loader()

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Iterator[MicroBatch]:
        batches = self._cpu_loader().batches(pipeline, requests, device, finish=False)
        if device.type == "cuda":
            yield from SideStream(self, pipeline, device, memory_format).run(batches)
            return
        for x, y, request in batches:
            yield self.finish(pipeline, x, y, request, device, memory_format)

    def finish(
        self,
        pipeline: Pipeline,
        x: torch.Tensor,
        y: torch.Tensor,
        request: Request,
        device: torch.device,
        memory_format: torch.memory_format,
    ) -> MicroBatch:
        """Copy a batch that was read to the device, then augment and normalise it there."""
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        return self.to_device(*pipeline.finish(x, y, request), request, device, memory_format)


class SideStream:
    """Prepares a few batches on a side stream of CUDA while the step runs on the main one."""

    def __init__(self, loader: Device, pipeline: Pipeline, device: torch.device, memory_format: torch.memory_format) -> None:
        self.loader, self.pipeline, self.device, self.memory_format = loader, pipeline, device, memory_format
        self.side = torch.cuda.Stream(device)

    def run(self, batches: Iterator[ReadBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches, each of which was started `ahead` batches before."""
        started: deque[tuple[MicroBatch, torch.cuda.Event, Batch]] = deque()
        for x, y, request in batches:
            started.append(self._start(x, y, request))
            if len(started) > self.loader.ahead:
                yield self._wait_for(*started.popleft())
        while started:
            yield self._wait_for(*started.popleft())

    def _start(self, x: torch.Tensor, y: torch.Tensor, request: Request) -> tuple[MicroBatch, torch.cuda.Event, Batch]:
        with torch.cuda.stream(self.side):
            micro = self.loader.finish(self.pipeline, x, y, request, self.device, self.memory_format)
            event = torch.cuda.Event()
            event.record(self.side)
        return micro, event, (x, y)  # the pinned memory must live until the copy is done

    def _wait_for(self, micro: MicroBatch, event: torch.cuda.Event, pinned: Batch) -> MicroBatch:
        """Make the main stream wait until a micro-batch is ready."""
        main = torch.cuda.current_stream(self.device)
        main.wait_event(event)
        for tensor in (micro.x, micro.y):  # the allocator must not reuse the memory while the step reads it
            tensor.record_stream(main)
        return micro
