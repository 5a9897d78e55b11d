"""loader=device: samples are read on the CPU, then copied, augmented and normalised on the device, ahead of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import Count
from drivetrain.loader.base import Ahead, Loader, Pipeline, ReadBatch, reading_advice
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers


class Device(Loader):
    """Raw samples (uint8) are copied to the device ahead of the step, and augmented and normalised there in batches.

    `reader` is the loader that reads them on the CPU. On a device without streams the same steps run one after the other.
    """

    effect = "close"
    changes = "samples are augmented on the device, which rounds otherwise"
    augments_on_device = True

    def __init__(
        self,
        reader: Literal["sync", "workers", "threads"] = "threads",
        num_readers: Count | Literal["auto"] = "auto",
        prefetch_factor: Ahead = 2,
        ahead: Count = 1,
    ) -> None:
        self.reader, self.num_readers, self.prefetch_factor, self.ahead = reader, num_readers, prefetch_factor, ahead

    def copies_ahead(self) -> int:
        return self.ahead

    def autotune(self, pipeline: Pipeline, size: int, batches: int, device: torch.device) -> list[str]:
        on_cpu = "loader=device: the device is the CPU, so batches are prepared between the steps, not beside them"
        return [on_cpu] if device.type == "cpu" else []

    def refusal(self, pipeline: Pipeline) -> str | None:
        return super().refusal(pipeline) or self._cpu_loader().refusal(pipeline)

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

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[ReadBatch]:
        yield from self._cpu_loader().batches(pipeline, requests, device, finish)
