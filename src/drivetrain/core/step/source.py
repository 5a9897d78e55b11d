"""The interfaces between sources of samples, augmentations and loaders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol, Self

from drivetrain.core.lazy import torch
from drivetrain.core.order import Indices, index_of
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.trees import Tree
from drivetrain.core.world import World


class Source(Protocol):
    """Samples that are read by index, a batch at a time. A class declares its further abilities; by default none."""

    parallel_read: bool = False  # reading a sample is expensive, such as decoding, so that threads share it
    crops: bool = False  # it crops samples while it reads them (CroppingSource)
    decodes_files: bool = False  # samples are image files, which a loader may decode itself
    own_code: OwnCode | None = None  # a user's code reads the samples (OwnCodeSource)
    order: Indices | None = None  # the order that training takes, from (seed, epoch); None: a random permutation
    in_order: bool = False  # a stream: samples are read one after the other
    # (n,) the length of each sequence, known without reading it (SequenceSource). With a target for each token it counts the
    # tokens that count in the loss.
    lengths: torch.Tensor | None = None
    groups: torch.Tensor | None = None  # (m,) the number of samples in each of the successive groups (GroupedSource)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, indices: torch.Tensor) -> tuple[Tree, Tree]:
        """Return inputs (n, …) and targets (n, …) of the samples `indices` (n,): tensors, or trees of them."""

    def name(self, index: int) -> str | None:
        """Return a sample's name for messages; None: it has none."""
        return None

    def labels(self) -> torch.Tensor | None:
        """Return the samples' classes (n,), where they are known without reading them."""
        return None

    def weights(self) -> torch.Tensor | None:
        """Return how often each sample is drawn, relative to the others (n,), where that is known."""
        return None

    def identities(self) -> Sequence[str | bytes] | torch.Tensor | None:
        """Return a text, or a whole number of 64 bits, for each sample that is the same in every run, on every machine.

        Samples that share one stay together where a validation set is held out. None: the content of tensors identifies samples,
        else their numbers. Where samples have `groups`, there is one text for each group.
        """
        return None

    def skipped(self) -> list[str] | None:
        """Return the names of samples that could not be read and were replaced; None: the source never replaces any."""
        return None

    def taken(self, world: World, seed: int, on_exit: ExitStack) -> Source:
        """Return the source that training reads until `on_exit`.

        Only this source uses up a stream's samples; all other readers only look.
        """
        return self

    def subset(self, indices: torch.Tensor) -> Source:
        """Return a source of the samples `indices` (n,): nothing is read or copied."""
        return Subset(self, indices)


class SequenceSource(Source, Protocol):
    """A source of sequences of several lengths, which pads each batch on the right with targets that the loss ignores."""

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets (n, length); the length is a multiple of `pad_to`, or the longest sample's."""


class GroupedSource(Source, Protocol):
    """A source of samples in groups that belong together, such as the pieces of a document."""

    def of(self, groups: torch.Tensor) -> Source:
        """Return a source of the samples of these groups."""


class OwnCode(Protocol):
    """A user's code that reads samples, and may draw random numbers."""

    def keeps(self) -> dict[str, object]:
        """Return the user's objects by name: a Dataset, and a function that makes batches."""

    def drawn(self) -> list[str]:
        """Return the random streams (such as numpy's) that the samples read so far drew from, without reads by threads."""

    def unshareable(self, threads: bool) -> str | None:
        """Return why threads, or else forked processes, cannot read the samples at once; None: they can."""

    def share(self, watch_torch: bool) -> None:
        """Prepare for reads by threads. With `watch_torch` no other code draws from torch's CPU stream meanwhile."""

    def suspected(self) -> bool:
        """Return whether samples that threads have read since the last call may have drawn random numbers."""


class OwnCodeSource(Source, Protocol):
    """A source of samples that a user's code reads."""

    def fetch(self, indices: torch.Tensor, pad_to: int = 1, draws: tuple[int, int] | None = (0, 0)) -> tuple[Tree, Tree]:
        """Return the samples. Their random draws follow from `draws` (a seed and an epoch); None: they are not seeded."""


class Subset(Source):
    """A view of a source, which reads through it. Its samples have all the source's abilities."""

    def __init__(self, source: Source, indices: torch.Tensor) -> None:
        self.source, self.indices = source, indices
        self.lengths = None if source.lengths is None else source.lengths[indices]
        self.parallel_read, self.crops, self.own_code = source.parallel_read, source.crops, source.own_code
        self.in_order = source.in_order
        self.order = None if source.order is None else self._order

    def __len__(self) -> int:
        return len(self.indices)

    def fetch(self, indices: torch.Tensor, *options: object) -> tuple[Tree, Tree]:
        """Return the samples at these positions of the view."""
        again = indices - index_of(indices)  # the repeats of samples (core/order.py)
        return self.source.fetch(self.indices[index_of(indices)] + again, *options)

    def name(self, index: int) -> str | None:
        return self.source.name(int(self.indices[index]))

    def labels(self) -> torch.Tensor | None:
        labels = self.source.labels()
        return None if labels is None else labels[self.indices]

    def weights(self) -> torch.Tensor | None:
        weights = self.source.weights()
        return None if weights is None else weights[self.indices]

    def skipped(self) -> list[str] | None:
        return self.source.skipped()

    def _order(self, seed: int, epoch: int) -> torch.Tensor:
        """Return the order of these samples in the source's own order."""
        assert self.source.order is not None
        position = torch.full((len(self.source),), -1)
        position[self.indices] = torch.arange(len(self.indices))
        ordered = position[self.source.order(seed, epoch)]
        return ordered[ordered >= 0]


def original(source: Source, index: int) -> tuple[Source, int]:
    """Return a view's source, and a sample's number in it."""
    while isinstance(source, Subset):
        index, source = int(source.indices[index]), source.source
    return source, index


class CropBox(Protocol):
    """A random crop of one image. Only reading the file gives the image's size."""

    interpolation: str  # bilinear or bicubic: how the crop is resized

    def __call__(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return left, top, width and height of the crop, in pixels of an upright image of this size."""


class CroppingSource(Source, Protocol):
    """A source that crops each image while it reads it, before resizing."""

    def fetch(self, indices: torch.Tensor, boxes: Sequence[CropBox] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images, or the crops `boxes` (n) of them, and their targets."""


class Normalizer(Protocol):
    """Turns a source's inputs into the model's."""

    mean: torch.Tensor  # (c, 1, 1), of the source's values

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised inputs; x is on the normaliser's device."""

    def to(self, device: torch.device) -> Normalizer:
        """Return the same normaliser for inputs on a device."""

    def rounded(self, dtype: torch.dtype) -> Normalizer:
        """Return the same normaliser with results of this dtype."""


class Augmentation(Protocol):
    """One step of a pipeline, which changes a batch's inputs and, where it mixes samples, its targets."""

    mixes: bool

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, pipeline: PipelineParts, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs, targets and sample indices (n,) of the changed batch."""

    def crop_boxes(self, seed: int, epoch: int, indices: torch.Tensor) -> Sequence[CropBox] | None:
        """Return the crops that a CroppingSource takes of the samples `indices` (n,); None: whole images."""


class PipelineParts(Protocol):
    """A source and the work on its samples (loader.Pipeline), as augmentations and other groups see it."""

    @property
    def source(self) -> Source: ...
    @property
    def steps(self) -> tuple[Augmentation, ...]: ...
    @property
    def normalize(self) -> Normalizer | None: ...  # None where inputs are ready
    @property
    def seed(self) -> int: ...
    @property
    def classes(self) -> int: ...
    @property
    def crops(self) -> bool: ...  # the source crops the samples while it reads them
    @property
    def masks(self) -> bool: ...  # targets are masks (n, h, w)
    @property
    def own_code(self) -> OwnCode | None: ...  # the user's code that reads the samples

    def __call__(self, request: Request) -> tuple[Tree, Tree]:
        """Return the inputs and targets of a request, ready for the model."""

    def normalized(self, x: Tree) -> Tree:
        """Return the normalised inputs, on the device that x and the normalisation are on."""

    def unnormalized(self) -> Self:
        """Return the same work without the normalisation."""

    def reading(self, source: Source) -> Self:
        """Return the same work on another source."""
