"""Loaders that augment on the device: loader=device reads on the CPU, loader=resident holds the whole set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Count, RunSpec, Share
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import Source
from drivetrain.core.step.step import Stream
from drivetrain.core.step.tensors import Tensors, has_streams
from drivetrain.core.step.trees import Tree
from drivetrain.loader.base import Ahead, Loader, Pipeline, ReadBatch, reading_advice
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers


class DeviceLoader(Loader):
    """Raw samples (uint8) are copied to the device ahead of the step, and augmented and normalised there in batches.

    The loader `reader` reads them on the CPU. On a device without streams the same steps run one after another.
    """

    effect = "close"
    changes = "samples are augmented on the device, which rounds differently"
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
        on_cpu = "loader=device: the device is the CPU, so batches are prepared between the steps, not alongside them"
        return [on_cpu] if device.type == "cpu" else []

    def refusal(self, pipeline: Pipeline) -> str | None:
        return super().refusal(pipeline) or self._cpu_loader().refusal(pipeline)

    def raise_if_worker_died(self, error: RuntimeError) -> None:
        self._cpu_loader().raise_if_worker_died(error)

    def advice(self, pipeline: Pipeline) -> str | None:
        if self.reader == "sync":
            return str(super().advice(pipeline)).replace("loader=", "loader.reader=")
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


CHUNK = 256  # samples read at a time
ENDLESS = 2**62  # as a padding multiple: every sequence is padded to the longest


class Resident(Loader):
    """Data sets are copied to the device once, in the source's form (uint8), and augmented there.

    They may take the share `share` of the device's free memory. Batches of small images are bound by launches, so many batches
    of an epoch are fetched, augmented and normalised at once, and each is a view. If the step computes in 16 bits, images are
    handed over in 16 bits, so that no batch needs its own conversion.
    """

    effect = "close"
    changes = "samples are augmented on the device, and images rounded to the step's 16 bits there"
    holds_samples = True

    def __init__(self, share: Share = 0.5) -> None:
        self.share = share
        self._on_device: WeakKeyDictionary[Source, Tensors] = WeakKeyDictionary()

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.batch.buckets_lengths:
            yield (
                f"{run.named('loader')} holds all samples at one length, and {run.named('batch')} groups them by theirs: "
                "set loader=device, or batch=fixed"
            )

    def refusal(self, pipeline: Pipeline) -> str | None:
        if problem := super().refusal(pipeline):
            return problem
        if not (drawn := pipeline.drawn()):
            return None
        return f"loader=resident reads each sample once, but these draw from {', '.join(drawn)} at each read: set loader=workers"

    def advice(self, pipeline: Pipeline) -> str | None:
        return None

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Stream:
        if pipeline.source not in self._on_device:
            self._on_device[pipeline.source] = self._copy(pipeline, device)
        source = self._on_device[pipeline.source]
        resident = pipeline.to(device)._replace(source=source)
        if resident.normalize is not None and resident.computes_in is not None:
            resident = resident._replace(normalize=resident.normalize.rounded(resident.computes_in))
        yield from super().stream(resident, requests, device, memory_format)

    def _copy(self, pipeline: Pipeline, device: torch.device) -> Tensors:
        """Copy a source to the device. Raises UserError if it does not fit."""
        if isinstance(pipeline.source, Tensors):
            if pipeline.source.device.type != device.type:
                self._check_size(pipeline.source.nbytes(), device)
            return pipeline.source.to(device)
        n = len(pipeline.source)
        # Without a source's random crops, which change every epoch. Sequences are padded to the longest.
        one_length = ENDLESS if pipeline.source.lengths is not None else 1
        whole = pipeline._replace(steps=(), pad_to=one_length)
        requests = (Request(0, indices, 1.0) for indices in torch.arange(n).split(CHUNK))
        x = y = torch.empty(0)
        reader = Threads(pin_memory=False) if pipeline.own_code is None else Loader()
        chunks = reader.batches(whole, requests, device, finish=False)
        for number, (chunk_x, chunk_y, request) in enumerate(chunks):
            if not number:
                self._check_size(n * trees.nbytes(chunk_x) // len(request.indices), device)
                x, y = _room(chunk_x, n, device), _room(chunk_y, n, device)
            rows = slice(number * CHUNK, number * CHUNK + len(request.indices))
            for tensor, part in zip(trees.leaves((x, y)), trees.leaves((chunk_x, chunk_y)), strict=True):
                if len(part) != len(request.indices):
                    raise UserError(
                        "loader=resident holds a row of each sample, but data.collate leaves some out: set loader=sync"
                    )
                if tensor.shape[1:] != part.shape[1:]:
                    raise UserError(
                        f"loader=resident holds samples of one shape, but these have {list(tensor.shape[1:])} and "
                        f"{list(part.shape[1:])}: set loader=device"
                    )
                tensor[rows] = part
        return Tensors(x, y)

    def _check_size(self, size: int, device: torch.device) -> None:
        free = free_memory(device)
        if free is not None and size > self.share * free:
            raise UserError(
                f"loader=resident: the data takes {size / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of the device are free, "
                f"and loader.share={self.share:g} of it is for data: set loader=device, smaller images, or a larger share"
            )


def _room(chunk: Tree, n: int, device: torch.device) -> Tree:
    """Return empty tensors on the device for `n` samples like those of a chunk."""
    return trees.map_tensors(lambda t: torch.empty((n, *t.shape[1:]), dtype=t.dtype, device=device), chunk)


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of the device; None if the system does not report them."""
    if has_streams(device):
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.M)
    return 1024 * int(found[1]) if found else None
