"""The interface of loaders, which all yield the same micro-batches in the same order, and loader=sync, the simplest one."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import starmap
from typing import Annotated, ClassVar, NamedTuple, cast
from weakref import WeakSet

from annotated_types import Ge, Le

from drivetrain.core.errors import DataError, Interrupted, refuse
from drivetrain.core.lazy import torch
from drivetrain.core.machine.guards import too_many, usable_cores
from drivetrain.core.machine.signals import Overdue, StopFlag
from drivetrain.core.options import groups
from drivetrain.core.options.option import Effect, Option, RunSpec
from drivetrain.core.order import AGAIN, index_of
from drivetrain.core.step import rng, trees
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.source import (
    Augmentation,
    CropBox,
    CroppingSource,
    Normalizer,
    OwnCode,
    OwnCodeSource,
    PipelineParts,
    SequenceSource,
    Source,
)
from drivetrain.core.step.step import Stream
from drivetrain.core.step.tensors import has_streams, send
from drivetrain.core.step.trees import Tree
from drivetrain.core.typed import StateDict
from drivetrain.core.user import state as owned
from drivetrain.core.world import World
from drivetrain.loader import pieces

logger = logging.getLogger(__name__)

IN_FLIGHT = 8  # copies that may be queued: each holds a batch in pinned memory until the device reaches it


@cache
def side_stream(device: torch.device) -> torch.Stream:
    """Return the copy stream of all loaders of this process: the allocator keeps freed memory separately for each stream."""
    stream: torch.Stream = torch.get_device_module(device).Stream(device)
    return stream


def copy_ahead(
    batches: Iterable[tuple[Tree, Tree, Request]],
    to_device: Callable[[Tree, Tree, Request], MicroBatch],
    device: torch.device,
    ahead: int,
) -> Iterator[MicroBatch]:
    """Yield `to_device(batch)` for each of `batches`, started `ahead` batches early.

    A micro-batch's memory belongs to the side stream, and the main stream reads it. Each start first waits for all work queued on
    the main stream, so memory dropped by the loop is free by then. `record_stream` would work too, but dropped memory would stay
    allocated until the device reaches it: a host many steps ahead would fill the device. For the same reason the host may be only
    IN_FLIGHT copies ahead: it waits for an older copy, which is done unless the device is that many steps behind.
    """
    module, side = torch.get_device_module(device), side_stream(device)
    started: deque[tuple[MicroBatch, torch.Event]] = deque()
    copies: deque[torch.Event] = deque()  # events of the copies under way
    for batch in batches:
        main = module.current_stream(device)
        if trees.first(batch[0]).device.type == "cpu":
            if len(copies) == ahead + IN_FLIGHT:
                copies.popleft().synchronize()
            side.wait_stream(main)
            with module.stream(side):
                started.append((to_device(*batch), side.record_event()))
            copies.append(started[-1][1])
        else:  # the main stream's memory
            started.append((to_device(*batch), main.record_event()))
        if len(started) > ahead:
            yield _wait_for(*started.popleft(), module.current_stream(device))
    while started:
        yield _wait_for(*started.popleft(), module.current_stream(device))


def _wait_for(micro: MicroBatch, event: torch.Event, main: torch.Stream) -> MicroBatch:
    """Make the main stream wait until a micro-batch is ready."""
    main.wait_event(event)
    return micro


WEIGHTS = 16  # cached micro-batch weights on the device: most are equal
LOOKED_AT = 16  # samples read to find out whether samples draw random numbers
VIEW = 8  # key of the random numbers of a sample's further views

Batch = tuple[Tree, Tree]  # inputs and targets
ReadBatch = tuple[Tree, Tree, Request]  # and the request that they answer
Ahead = Annotated[int, Ge(1), Le(1024)]  # batches read ahead


@dataclass(frozen=True)
class FirstTokens:
    """The step of a stage that reads only the first tokens of each text, as a warm-up of the sequence length does."""

    most: int
    mixes = False

    def apply(
        self, x: Tree, y: torch.Tensor, indices: torch.Tensor, pipeline: PipelineParts, request: Request
    ) -> tuple[Tree, torch.Tensor, torch.Tensor]:
        """Return the first tokens of one or several inputs (n, length) and of targets (n, length), and the indices."""
        return trees.map_tensors(lambda each: each[:, : self.most], x), y[:, : self.most], indices

    def crop_boxes(self, seed: int, epoch: int, indices: torch.Tensor) -> None:
        """Return None: texts are read whole."""


class Pipeline(NamedTuple):
    """The work on a request's samples: `read` on the CPU, then `finish` there or on the device. Picklable.

    With `normalize_later`, `finish` only augments: the device normalises the batch, so bytes are copied, not floats.
    """

    source: Source
    steps: tuple[Augmentation, ...]  # in their order
    normalize: Normalizer | None  # None if the source's values are ready
    seed: int
    classes: int = 0
    pad_to: int = 1  # sequences are padded to a multiple of this
    normalize_later: bool = False
    images: str | None = None  # the key of the images if inputs are a dict: only they are augmented and normalised
    views: int = 1  # per sample; several give (n, views, …), each augmented separately
    masks: bool = False  # targets are masks (n, h, w), which move with their images
    computes_in: torch.dtype | None = None  # dtype to which the step rounds the inputs of all products, if it does

    def read(self, request: Request) -> Batch:
        """Return the source's inputs and targets of `request.indices_to_read()`."""
        return self.read_samples(request.indices_to_read(), request)

    def read_samples(self, numbers: torch.Tensor, request: Request, alone: bool = True) -> Batch:
        """Return inputs and targets of some of the request's samples, cropped if source and first step support it.

        If `alone`, a user's code draws by seed, epoch and index. Next to other threads it cannot.
        """
        if self.source.own_code is not None:
            return cast(OwnCodeSource, self.source).fetch(numbers, self.pad_to, (self.seed, request.epoch) if alone else None)
        indices = index_of(numbers) if request.again else numbers
        if self.pad_to > 1:
            return cast(SequenceSource, self.source).fetch(indices, self.pad_to)
        boxes = self.crop_boxes(numbers, request)
        return self.source.fetch(indices) if boxes is None else cast(CroppingSource, self.source).fetch(indices, boxes)

    @property
    def own_code(self) -> OwnCode | None:
        """The user's code that reads the samples, if any."""
        return self.source.own_code

    def reading(self, source: Source) -> Pipeline:
        """Return the same work on another source."""
        return self._replace(source=source)

    def unnormalized(self) -> Pipeline:
        """Return the same work without the normalisation."""
        return self._replace(normalize=None)

    def taken(self, world: World, on_exit: ExitStack) -> Pipeline:
        """Return the pipeline for training, until `on_exit`; it uses up a stream's samples."""
        return self.reading(self.source.taken(world, self.seed, on_exit))

    def drawn(self, numbers: torch.Tensor | None = None) -> list[str]:
        """Read samples of a user's code again, by default some first ones. Return the random streams they used, such as numpy."""
        if self.own_code is None:
            return []
        self.source.fetch(torch.arange(min(LOOKED_AT, len(self.source))) if numbers is None else numbers)
        return self.own_code.drawn()

    def crop_boxes(self, indices: torch.Tensor, request: Request) -> Sequence[CropBox] | None:
        """Return the source's crops of the samples `indices` (n,); None: whole images."""
        return self.steps[0].crop_boxes(self.seed, request.epoch, indices) if self.steps and self.crops else None

    @property
    def crops(self) -> bool:
        """True if the source crops samples while reading. It crops each once, so not with several views."""
        return self.views == 1 and self.source.crops

    def finish(self, x: Tree, y: Tree, request: Request) -> Batch:
        """Augment, mix and normalise the output of `read`, on its device."""
        x, y = self.augment(x, y, request)
        return (x if self.normalize_later else self.normalized(x)), y

    def augment(self, x: Tree, y: Tree, request: Request) -> Batch:
        """Augment and mix the output of `read`, on its device."""
        if self.views > 1:
            made = [self._view(number).augment(x.clone(), y, request)[0] for number in range(self.views)]
            return torch.stack(made, 1), y
        if not self.steps:
            return x, y
        if self.own_code is not None and (rows := trees.length(x)) != (asked := len(request.indices_to_read())):
            raise DataError(f"data.collate made {rows} rows of {asked} samples, and augment cannot match them: set augment=[]")
        values = x if self.images is None else x[self.images]
        indices = send(request.indices_to_read(), trees.first(values).device)
        for step in self.steps:
            values, y, indices = step.apply(values, y, indices, self, request)
        return (values if self.images is None else {**x, self.images: values}), y

    def _view(self, number: int) -> Pipeline:
        """Return the pipeline of one of several views, with its own random numbers."""
        return self._replace(views=1, seed=rng.mix(self.seed, VIEW, number) if number else self.seed)

    def normalized(self, x: Tree) -> Tree:
        """Return the normalised inputs, on the device of x and the normalisation."""
        if self.normalize is None:
            return x
        return self.normalize(x) if self.images is None else {**x, self.images: self.normalize(x[self.images])}

    def to(self, device: torch.device) -> Pipeline:
        """Return the same pipeline for batches on a device."""
        return self if self.normalize is None else self._replace(normalize=self.normalize.to(device))

    def __call__(self, request: Request) -> Batch:
        """Read and finish a request's samples."""
        return self.finish(*self.read(request), request)


class Loader(Option, groups.Loader):
    """loader=sync: the training loop reads each batch itself, as torch's DataLoader does by default."""

    why_fixed: ClassVar[str] = "it reads for the whole run and changes no result"
    effect: ClassVar[Effect] = "exact"
    augments_on_device = False  # batches are copied as read; otherwise augmented first

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.data.on_device and type(self) is not Loader:
            yield f"{run.named('loader')} has nothing to do: {run.named('data')} is made on the device: set loader=sync"
        things, setting, count = self.readers()
        yield from too_many(things, f"{setting}={count}", count, run.parallel.local_ranks())

    def readers(self) -> tuple[str, str, int]:
        """Return the readers of each rank (processes or threads), the setting for their number, and their number."""
        return "threads", "", 0

    def refusal(self, pipeline: Pipeline) -> str | None:
        """Return why this loader cannot read a pipeline's samples, and the remedy; None: it can."""
        kept = owned.find(pipeline.own_code.keeps()) if pipeline.own_code is not None and type(self) is not Loader else {}
        if not kept:
            return None
        name, owner = next(iter(kept.items()))
        return f"{name} ({type(owner).__name__}) has a state, and only loader=sync keeps it in step with the run: set loader=sync"

    def check(self, pipelines: Iterable[Pipeline]) -> None:
        """Raise UserError if this loader cannot read the samples of one of them."""
        refuse(problem for problem in dict.fromkeys(map(self.refusal, pipelines)) if problem is not None)

    def autotune(self, pipeline: Pipeline, size: int, batches: int, device: torch.device) -> list[str]:
        """Measure and choose settings before a run of that many batches of `size`; return a line for each choice."""
        return []

    def state_dict(self) -> StateDict:
        """Return the state for a resumed run."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a `state_dict()`, after `autotune`."""

    def raise_if_worker_died(self, error: RuntimeError) -> None:
        """Raise Interrupted if `error` reports a worker's death. torch raises that anywhere in the run."""

    def advice(self, pipeline: Pipeline) -> str | None:
        """Return overrides that help when the device waits for this loader, with the reason; None: none is known."""
        name = "threads" if pipeline.own_code is None else "workers"  # processes share nothing of a Dataset
        return f"loader={name} reads ahead while the device works"

    def copies_ahead(self) -> int:
        """Return how many batches are copied to a device with streams before the loop asks for them; 0: copies block the loop."""
        return 0

    def stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Stream:
        """Yield the micro-batches of `requests` on the device, in their order."""
        if not (most := pieces.samples_at_once(pipeline.source, pipeline.views, device)):
            yield from self._stream(pipeline, requests, device, memory_format)
            return
        weights: dict[float, torch.Tensor] = {}
        for piece in pieces.pieces(requests, most):
            (whole,) = self._stream(pipeline, [pieces.joined(piece)], device, memory_format)
            yield from pieces.divided(whole, piece, weights)

    def _stream(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, memory_format: torch.memory_format
    ) -> Stream:
        """Yield the micro-batch of each request."""
        on_device = pipeline.to(device)
        if device.type != "cpu":
            pipeline = pipeline._replace(normalize_later=True)
        elif not self.augments_on_device:
            on_device = on_device._replace(normalize=None)  # readers normalise instead of the loop
        batches = self.batches(pipeline, requests, device, finish=not self.augments_on_device)
        if pipeline.own_code is not None:
            batches = rows_counted(batches, pipeline.own_code)

        weigh = lru_cache(WEIGHTS)(partial(torch.full, (), device=device))  # a kernel fills it: nothing is copied
        to_device = partial(self.to_device, on_device, device, memory_format, weigh)
        if (ahead := self.copies_ahead()) and has_streams(device):
            yield from copy_ahead(batches, to_device, device, ahead)
        else:
            yield from starmap(to_device, batches)

    def batches(
        self, pipeline: Pipeline, requests: Iterable[Request], device: torch.device, finish: bool = True
    ) -> Iterator[ReadBatch]:
        """Yield each request's batch in order, on the source's device: finished, or, without `finish`, only read."""
        work = pipeline if finish else pipeline.read
        ends_reads = StopFlag.ends_reads()
        for request in requests:
            began = time.perf_counter()
            try:
                with ends_reads:
                    x, y = work(request)
            except Overdue:
                raise timeout_error("loader=sync", 0, pipeline, int(request.indices[0])) from None
            request.ready = time.perf_counter()
            request.seconds = request.ready - began
            yield x, y, request

    def to_device(
        self,
        pipeline: Pipeline,
        device: torch.device,
        memory_format: torch.memory_format,
        weigh: Callable[[float], torch.Tensor],
        x: Tree,
        y: Tree,
        request: Request,
    ) -> MicroBatch:
        """Copy a batch to the device, and run the rest of the pipeline there."""
        if device.type != "cpu":
            copy = send if self.copies_ahead() else trees.to
            x, y = copy(x, device), copy(y, device)
        if self.augments_on_device:
            x, y = pipeline.augment(x, y, request)
        # The memory format changes after the copy, because a CPU would write to unpinned memory, and before
        # normalising, since bytes are a quarter of the floats.
        x = pipeline.normalized(in_memory_format(x, memory_format, pipeline.views))
        weight = request.weight
        return MicroBatch(x, y, weigh(weight), request.last, request.epoch_end, request.seconds, request.ready, not weight)


_said: WeakSet[OwnCode] = WeakSet()


def rows_counted(batches: Iterator[ReadBatch], code: OwnCode) -> Iterator[ReadBatch]:
    """Yield the batches; report once, after an epoch or an evaluation, a number of rows other than of samples."""
    asked = came = 0

    def say() -> None:
        if asked != came and code not in _said and code.keeps().get("data.collate") is not None:
            _said.add(code)
            said = "data.collate made %s rows of %s samples: an update is the mean over the actual rows"
            logger.warning(said, f"{came:,}", f"{asked:,}")

    try:
        for x, y, request in batches:
            rows = next((len(leaf) for leaf in trees.leaves(y) if leaf.ndim), 1)
            if not rows:
                raise DataError(f"data.collate made no row of the samples {request.indices[:4].tolist()} …: let one of them stay")
            asked, came = asked + len(request.indices_to_read()), came + rows
            if request.epoch_end:
                say()
            yield x, y, request
    finally:
        say()


def in_memory_format(x: Tree, memory_format: torch.memory_format, views: int = 1) -> Tree:
    """Return inputs in this memory format. channels_last changes only tensors of four dimensions."""
    if views > 1:
        return in_memory_format(x.flatten(0, 1), memory_format).unflatten(0, (-1, views))
    if isinstance(x, torch.Tensor) and (x.ndim == 4 or memory_format is torch.contiguous_format):
        return x.to(memory_format=memory_format)
    return trees.map_tensors(lambda t: t.to(memory_format=memory_format) if t.ndim == 4 else t, x)


def timeout_error(
    reader: str, seconds: float, pipeline: Pipeline, index: int, cause: str = "a stuck read, or too slow a disk"
) -> Interrupted:
    """Return the error for a `reader` that delivered nothing for `seconds`, of a batch that begins with `index`."""
    index &= AGAIN - 1
    sample = pipeline.source.name(index) or f"sample {index}"
    if StopFlag.told_to_stop():
        return Interrupted(f"stopped by a signal while {reader} delivered nothing, of a batch that begins with {sample}")
    return Interrupted(
        f"{reader} has delivered nothing for {seconds:g} s (loader.timeout_s), of a batch that begins with {sample}: {cause}"
    )


def reading_advice(pipeline: Pipeline, setting: str = "", readers: int | None = None) -> str | None:
    """The advice for a loader that already reads ahead: more `readers` (set by `setting`) with free cores, or packed data."""
    cores = usable_cores()
    advice = [f"{setting}={cores}, one for each core"] if readers is not None and readers < cores else []
    if pipeline.source.decodes_files:
        advice.append("data=packed reads samples decoded once by `drivetrain pack`")
    return ", or ".join(advice) or None
