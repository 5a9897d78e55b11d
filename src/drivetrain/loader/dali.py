"""NVIDIA DALI, fed with our samples in our order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any, Literal

from drivetrain.core.cpus import usable_cores
from drivetrain.core.errors import DataError
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import Count, RunSpec, needs_extra
from drivetrain.loader.base import Loader, Pipeline, quicker_reading


class Dali(Loader):
    """DALI decodes JPEGs, cuts and resizes them; the rest of the augmentation and all else is as with every loader.

    Its resizing is not ours to the last bit: pixels differ by a level or two of 255 (samples, order and crops do not).
    Files that are no plain JPEG, and batches it fails on, are decoded as the other loaders do, so that faults are treated alike.
    """

    non_blocking = True

    def __init__(
        self,
        num_threads: Count | Literal["auto"] = "auto",
        prefetch_factor: Count = 2,
        decoder: Literal["auto", "cpu", "mixed"] = "auto",
    ) -> None:
        self.num_threads, self.prefetch_factor, self.decoder = num_threads, prefetch_factor, decoder

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not run.data.decodes():
            yield (
                f"{run.named('loader')} decodes image files, and {run.named('data')} has none: "
                "set loader=threads, or data=imagefolder, webdataset or a packed folder with --jpeg"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("nvidia.dali", "dali", "loader=dali")
        if self.decoder == "mixed" and run.runtime.kind() == "cpu":
            yield "loader.decoder=mixed needs a CUDA device, which this run has not: set loader.decoder=cpu"

    def faster(self, pipeline: Pipeline) -> str | None:
        return quicker_reading(pipeline)

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[tuple[Any, Any, Request]]:
        if not hasattr(pipeline.source, "undecoded"):  # a part that is in memory
            yield from super().batches(pipeline, requests, device, finish)
            return
        wanted = iter(requests)
        first = next(wanted, None)
        while first is not None:
            feed = Feed(pipeline, chain([first], wanted), len(first.rows()))
            for x, y, request in self._decoded(feed, device):
                yield *(pipeline.finish(x, y, request) if finish else (x, y)), request
            first = feed.beyond or next(wanted, None)

    def _decoded(self, feed: Feed, device: torch.device) -> Iterator[tuple[Any, Any, Request]]:
        """The batches until the feed ends or DALI fails, those that were under way with it included."""
        threads = usable_cores() if self.num_threads == "auto" else self.num_threads
        mixed = device.type == "cuda" and self.decoder != "cpu"
        work = _built(feed, threads, self.prefetch_factor, device.index or 0 if mixed else None)
        stream = {"cuda_stream": torch.cuda.current_stream(device)} if mixed else {}
        while True:
            try:
                (images,) = work.run(**stream)
            except StopIteration:
                break
            except RuntimeError:  # a damaged file: our own decoding names it, or puts another in its place
                break
            request, labels, others = feed.waiting.popleft()
            x = torch.from_dlpack(images.as_tensor()).clone().permute(0, 3, 1, 2)
            for place, image in others:
                x[place] = image.to(x.device)
            yield x, labels, request
        for request, *_ in feed.waiting:
            yield *feed.pipeline.read(request), request
        if feed.error is not None:
            raise feed.error


class Feed:
    """DALI's source: files and what to cut out of them, batch by batch, up to one that is larger than `size`."""

    def __init__(self, pipeline: Pipeline, requests: Iterator[Request], size: int) -> None:
        self.pipeline, self.requests, self.size = pipeline, requests, size
        self.waiting: deque[tuple[Request, torch.Tensor, list[tuple[int, torch.Tensor]]]] = deque()
        self.beyond: Request | None = None
        self.error: DataError | None = None  # kept back: DALI would turn it into one of its own

    def __call__(self) -> Any:
        try:
            request = None if self.beyond or self.error else next(self.requests, None)  # DALI asks again behind the end
            if request is not None and len(request.rows()) > self.size:
                self.beyond, request = request, None
            if request is not None:
                return self._files(request)
        except DataError as error:
            self.error = error
        raise StopIteration

    def _files(self, request: Request) -> Any:
        import numpy as np

        source, rows = self.pipeline.source, request.rows()
        boxes = self.pipeline.boxes(rows, request)
        files, areas, labels, others = [], [], [], []
        for place, (index, box) in enumerate(zip(rows.tolist(), boxes or [None] * len(rows), strict=True)):
            content, label, layout, found = source.undecoded(index, box)
            area = layout.area
            if not layout.plain:  # its place is held by a picture that DALI has nothing to do with
                others.append((place, source.sample(found, box)[0]))
                content, area = _blank(), (0, 0, 8, 8)
            files.append(np.frombuffer(content, np.uint8))
            areas.append(area)
            labels.append(label)
        corners = np.array(areas, np.int32)
        self.waiting.append((request, torch.tensor(labels), others))
        return files, list(corners[:, :2]), list(corners[:, 2:])


def _built(feed: Feed, threads: int, ahead: int, device: int | None) -> Any:
    """A DALI pipeline: decode the cut-out part, resize it, (n, size, size, 3)."""
    import nvidia.dali.types
    from nvidia.dali import Pipeline as Graph
    from nvidia.dali import fn

    types: Any = nvidia.dali.types  # its names are made at run time
    size = feed.pipeline.source.size
    boxes = feed.pipeline.boxes(torch.zeros(1, dtype=torch.int64), Request(0, torch.zeros(1, dtype=torch.int64), torch.ones(())))
    cubic = boxes is not None and boxes[0].interpolation == "bicubic"
    graph = Graph(batch_size=feed.size, num_threads=threads, device_id=device, prefetch_queue_depth=ahead)
    with graph:
        files, corner, extent = fn.external_source(
            source=feed, num_outputs=3, batch=True, dtype=[types.UINT8, types.INT32, types.INT32], ndim=[1, 1, 1]
        )
        images = fn.decoders.image_slice(
            files, corner, extent, axis_names="WH", output_type=types.RGB, device="cpu" if device is None else "mixed"
        )
        interpolation = types.INTERP_CUBIC if cubic else types.INTERP_LINEAR
        graph.set_outputs(fn.resize(images, size=(size, size), interp_type=interpolation, antialias=True))
    graph.build()
    return graph


@cache
def _blank() -> bytes:
    """A small JPEG."""
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "JPEG")
    return out.getvalue()
