"""loader=prefetch_one"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from drivetrain.core.lazy import torch
from drivetrain.core.step.microbatch import Request
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.base import ReadBatch


class PrefetchOne(Loader):
    """One thread reads the next micro-batch while the device computes this one."""

    effect = "exact"  # the same batches in the same order

    def copies_ahead(self) -> int:
        return 1  # on a GPU a batch is copied while the step before it computes

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[ReadBatch]:
        batches = super().batches(pipeline, requests, device, finish)
        with ThreadPoolExecutor(1, "prefetch_one") as reader:
            following = reader.submit(next, batches, None)
            while (batch := following.result()) is not None:
                following = reader.submit(next, batches, None)
                yield batch
