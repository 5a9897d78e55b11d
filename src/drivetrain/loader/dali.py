"""loader=dali: NVIDIA DALI decodes the samples, in the same order as every loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal, NamedTuple

from drivetrain.core.errors import DataError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.guards import usable_cores
from drivetrain.core.options.option import Count, RunSpec, needs_extra
from drivetrain.core.order import index_of
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import CropBox
from drivetrain.core.step.tensors import send
from drivetrain.loader.base import Ahead, Loader, Pipeline, ReadBatch, reading_advice


class Dali(Loader):
    """DALI decodes JPEGs, crops and resizes them; augmentation and everything else are as in the other loaders.

    Samples, order and crops are the same, but pixels differ by one or two levels of 255, because DALI resizes differently.
    Files other than plain JPEGs, and batches on which DALI fails, are decoded as by the other loaders.
    """

    effect = "changes"
    changes = "pixels: DALI decodes, crops and resizes differently"
    needs_real_tensors = "DALI decodes on the device"

    def __init__(
        self,
        num_threads: Count | Literal["auto"] = "auto",
        prefetch_factor: Ahead = 2,
        decoder: Literal["auto", "cpu", "mixed"] = "auto",
    ) -> None:
        self.num_threads, self.prefetch_factor, self.decoder = num_threads, prefetch_factor, decoder

    def readers(self) -> tuple[str, str, int]:
        return "threads", "loader.num_threads", 0 if self.num_threads == "auto" else self.num_threads

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not run.data.decodes_images():
            yield (
                f"{run.named('loader')} decodes image files, and {run.named('data')} has none: "
                "set loader=threads, or data=imagefolder, webdataset or a packed folder with --jpeg"
            )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra("nvidia.dali", "dali", "loader=dali")
        if self.decoder == "mixed" and run.runtime.device_type() != "cuda":
            yield "loader.decoder=mixed needs a CUDA device, but this run has none: set loader.decoder=cpu"

    def copies_ahead(self) -> int:
        return 1

    def advice(self, pipeline: Pipeline) -> str | None:
        return reading_advice(pipeline)

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[ReadBatch]:
        if not pipeline.source.decodes_files:  # a split in memory
            yield from super().batches(pipeline, requests, device, finish)
            return
        remaining = iter(requests)
        first = next(remaining, None)
        while first is not None:
            files = FileBatches(pipeline, chain([first], remaining), len(first.indices_to_read()))
            for x, y, request in self._decode(files, device):
                yield *(pipeline.finish(x, y, request) if finish else (x, y)), request
            first = files.too_large or next(remaining, None)

    def _decode(self, files: FileBatches, device: torch.device) -> Iterator[ReadBatch]:
        """Yield the decoded batches until `files` ends or DALI fails; after a failure, the batches that DALI had already read."""
        threads = usable_cores() if self.num_threads == "auto" else self.num_threads
        mixed = device.type == "cuda" and self.decoder != "cpu"
        graph = _build_graph(files, threads, self.prefetch_factor, device.index or 0 if mixed else None)
        # The stream on which the images are read. DALI takes it only by position: a keyword would be an input's name.
        stream = [torch.get_device_module(device).current_stream(device)] if mixed else []
        while True:
            try:
                (images,) = graph.run(*stream)
            except StopIteration:
                break
            except RuntimeError:  # a damaged file: the source decodes it below, and names or replaces it
                break
            batch = files.at_dali.popleft()
            x = torch.from_dlpack(images.as_tensor()).clone().permute(0, 3, 1, 2)
            for row, image in batch.replacements:
                x[row] = send(image, x.device)
            yield x, send(batch.labels, x.device), batch.request
        for batch in files.at_dali:
            yield *files.pipeline.read(batch.request), batch.request
        if files.error is not None:
            raise files.error


class FileBatch(NamedTuple):
    """A batch that DALI is decoding."""

    request: Request
    labels: torch.Tensor  # (n,)
    replacements: list[tuple[int, torch.Tensor]]  # rows not decoded by DALI, and their images (3, size, size)


class FileBatches:
    """DALI's external source: image files and their crops, a batch at a time, until one has more than `size` samples."""

    def __init__(self, pipeline: Pipeline, requests: Iterator[Request], size: int) -> None:
        self.pipeline, self.requests, self.size = pipeline, requests, size
        self.at_dali: deque[FileBatch] = deque()
        self.too_large: Request | None = None  # the request that ended the batches
        self.error: DataError | None = None  # raised after the last batch: DALI would replace it by its own error

    def __call__(self) -> Any:
        try:
            ended = self.too_large or self.error  # DALI asks again after the end
            request = None if ended else next(self.requests, None)
            if request is not None and len(request.indices_to_read()) > self.size:
                self.too_large, request = request, None
            if request is not None:
                return self._read(request)
        except DataError as error:
            self.error = error
        raise StopIteration

    def _read(self, request: Request) -> Any:
        """Return the files of a request, the top left corners of their crops, and the crops' sizes."""
        import numpy as np

        source: Any = self.pipeline.source
        indices = request.indices_to_read()
        boxes: Sequence[CropBox | None] = self.pipeline.crop_boxes(indices, request) or [None] * len(indices)
        files, crops, read, replacements = [], [], [], []
        for row, (index, box) in enumerate(zip(index_of(indices).tolist(), boxes, strict=True)):
            content, layout, found = source.image_file_and_layout(index, box)
            crop = layout.crop
            if not layout.plain_jpeg:  # DALI gets a small JPEG in its place
                replacements.append((row, source.sample(found, box)[0]))
                content, crop = _small_jpeg(), (0, 0, 8, 8)
            files.append(np.frombuffer(content, np.uint8))
            crops.append(crop)
            read.append(found)
        corners = np.array(crops, np.int32)
        self.at_dali.append(FileBatch(request, source.targets[read], replacements))
        return files, list(corners[:, :2]), list(corners[:, 2:])


def _build_graph(batches: FileBatches, threads: int, ahead: int, device: int | None) -> Any:
    """Build the DALI pipeline that decodes each file's crop and resizes it: (n, size, size, 3)."""
    import nvidia.dali.types
    from nvidia.dali import Pipeline as Graph
    from nvidia.dali import fn

    types: Any = nvidia.dali.types  # its names exist only at run time
    source: Any = batches.pipeline.source
    some = torch.zeros(1, dtype=torch.int64)
    boxes = batches.pipeline.crop_boxes(some, Request(0, some, 1.0))
    cubic = boxes is not None and boxes[0].interpolation == "bicubic"
    graph = Graph(batch_size=batches.size, num_threads=threads, device_id=device, prefetch_queue_depth=ahead)
    with graph:
        files, corner, extent = fn.external_source(
            source=batches, num_outputs=3, batch=True, dtype=[types.UINT8, types.INT32, types.INT32], ndim=[1, 1, 1]
        )
        images = fn.decoders.image_slice(
            files, corner, extent, axis_names="WH", output_type=types.RGB, device="cpu" if device is None else "mixed"
        )
        interpolation = types.INTERP_CUBIC if cubic else types.INTERP_LINEAR
        graph.set_outputs(fn.resize(images, size=source.how.sides, interp_type=interpolation, antialias=True))
    graph.build()
    return graph


@cache
def _small_jpeg() -> bytes:
    """Return a JPEG of 8×8 pixels."""
    import io

    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "JPEG")
    return out.getvalue()
