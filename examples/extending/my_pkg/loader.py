"""loader=prefetch_one"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.loader import Loader, Pipeline


class PrefetchOne(Loader):
    """One thread reads the next micro-batch while the device computes this one."""

    effect = "exact"  # the same batches in the same order

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Iterator[MicroBatch]:
        batches = super().stream(pipeline, requests, device, memory_format)
        with ThreadPoolExecutor(1, "prefetch_one") as reader:
            following = reader.submit(next, batches, None)
            while (batch := following.result()) is not None:
                following = reader.submit(next, batches, None)
                yield batch
