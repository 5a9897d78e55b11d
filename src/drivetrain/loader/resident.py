"""The whole set on the device: nothing is read while training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.option import Share
from drivetrain.core.tensors import Tensors
from drivetrain.loader.base import Loader, Pipeline
from drivetrain.loader.threads import Threads

CHUNK = 256  # samples that are read at once


class Resident(Loader):
    """The data sets are brought to the device once, as they lie in the source (uint8), and sampled and augmented there.

    They may take `share` of the device's free memory.
    """

    def __init__(self, share: Share = 0.5) -> None:
        self.share = share
        self._held: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # source → the same on the device

    def faster(self, pipeline: Pipeline) -> str | None:
        return None

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Iterator[MicroBatch]:
        if pipeline.source not in self._held:
            self._held[pipeline.source] = self._brought(pipeline, device)
        yield from super().stream(pipeline._replace(source=self._held[pipeline.source]), requests, device, memory_format)

    def _brought(self, pipeline: Pipeline, device: torch.device) -> Any:
        if isinstance(pipeline.source, Tensors):
            return pipeline.source.to(device)
        n = len(pipeline.source)
        weight = torch.ones(())
        whole = pipeline._replace(steps=())  # what a step would cut out while decoding, it would have cut for good
        chunks = (Request(0, part, weight) for part in torch.arange(n).split(CHUNK))
        x = y = torch.empty(0)
        reader = Threads(pin_memory=False).batches(whole, chunks, device, finish=False)
        for at, (part_x, part_y, request) in enumerate(reader):
            if not at:
                self._must_fit(n * part_x[0].numel() * part_x.element_size(), device)
                x = torch.empty((n, *part_x.shape[1:]), dtype=part_x.dtype, device=device)
                y = torch.empty((n, *part_y.shape[1:]), dtype=part_y.dtype, device=device)
            rows = slice(at * CHUNK, at * CHUNK + len(request.indices))
            x[rows], y[rows] = part_x, part_y
        return Tensors(x, y)

    def _must_fit(self, size: int, device: torch.device) -> None:
        free = free_memory(device)
        if free is not None and size > self.share * free:
            raise UserError(
                f"loader=resident: the data takes {size / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of the device are free, "
                f"of which loader.share={self.share:g} is for data: set loader=device, smaller images, or a larger share"
            )


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device; None where that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        about = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", about, re.M)
    return 1024 * int(found[1]) if found else None
