"""What sources of samples, augmentations and loaders expect of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from drivetrain.core.microbatch import Request
    from drivetrain.core.trees import Tree


class Source(Protocol):
    """Samples that are read by index, a batch at a time.

    A source may have more than `__len__` and `fetch`:

    - `order(seed, epoch)`: indices (n,), the order that training takes in that epoch; without it, a random permutation.
    - `name(index)`: what messages call a sample.
    - `skipped()`: the names of samples that could not be read and were replaced.
    - `labels()`: the samples' classes (n,), where they are known without reading; the validation set has the same share of each.
    - `identities()`: a text for each sample that is the same in every run, on every machine. Those that share one stay together
      where a validation set is held out. Without it: the content of tensors, else the samples' numbers.
    - `subset(indices)`: a source of some of the samples; without it core.subset.Subset is one.
    - `own_code = True`: samples are read by a user's code, which may draw random numbers (OwnCodeSource).
    - `parallel_read = True`: reading one sample is work, such as decoding, which threads should share.
    - `crops = True`: it crops samples while it reads them (CroppingSource).
    - `lengths` (n,), for sequences: the length of each sample, known without reading it (SequenceSource). Where there is a
      target for each token, it is the number of those that count in the loss.
    """

    def __len__(self) -> int: ...

    def fetch(self, indices: torch.Tensor) -> tuple[Tree, Tree]:
        """Return inputs (n, …) and targets (n, …) of the samples `indices` (n,): tensors, or trees of them."""
        ...


class SequenceSource(Source, Protocol):
    """A source of sequences of several lengths, which pads each batch on the right with targets that the loss ignores."""

    lengths: torch.Tensor  # (n,)

    def fetch(self, indices: torch.Tensor, pad_to: int = 1) -> tuple[Tree, Tree]:
        """Return inputs and targets (n, length), their length a multiple of `pad_to` or the longest sample there is."""
        ...


class OwnCodeSource(Source, Protocol):
    """A source of samples that a user's code reads."""

    def keeps(self) -> dict[str, Any]:
        """Return what the user brought by name: a Dataset, and a function that makes batches."""
        ...

    def draws(self, indices: torch.Tensor | None = None) -> list[str]:
        """Return what these samples draw from, such as numpy; without indices, some of the first ones."""
        ...

    def share(self, watch_torch: bool) -> None:
        """Prepare for reads by threads. With `watch_torch` nobody else draws from torch's stream of the CPU meanwhile."""
        ...

    def suspected(self) -> bool:
        """Return whether samples that threads have read since the last question may have drawn."""
        ...

    def fetch(self, indices: torch.Tensor, pad_to: int = 1, draws: tuple[int, int] | None = (0, 0)) -> tuple[Tree, Tree]:
        """Return the samples. What they draw follows from `draws`, a seed and an epoch; None: it is left as it comes."""
        ...


class CropBox(Protocol):
    """A random crop of one image, whose size becomes known when its file is read."""

    interpolation: str  # bilinear or bicubic: how the crop is resized

    def __call__(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return left, top, width and height of the crop, in pixels of an upright image of this size."""
        ...


class CroppingSource(Source, Protocol):
    """A source of images that crops each while it reads it, before the image is resized."""

    crops: bool

    def fetch(self, indices: torch.Tensor, boxes: Sequence[CropBox] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images, or the crops `boxes` (n) of them, and their targets."""
        ...


class Normalizer(Protocol):
    """Turns a source's inputs into the model's."""

    mean: torch.Tensor  # (c, 1, 1), of the source's values

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised inputs; x is on the normaliser's device."""
        ...

    def to(self, device: torch.device) -> Normalizer:
        """Return the same normaliser for inputs on a device."""
        ...


class Augmentation(Protocol):
    """One step of a pipeline, which changes a batch's inputs and, where it mixes samples, its targets."""

    mixes: bool

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, pipeline: SamplePipeline, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs, targets and sample indices (n,) of the changed batch."""
        ...

    def crop_boxes(self, seed: int, epoch: int, indices: torch.Tensor) -> Sequence[CropBox] | None:
        """Return the crops that a CroppingSource takes of the samples `indices` (n,); None: whole images."""
        ...


class SamplePipeline(Protocol):
    """What an augmentation can see of the pipeline it is a step of (loader.Pipeline)."""

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
    def crops(self) -> bool: ...  # the source has cropped the samples while it read them
    @property
    def masks(self) -> bool: ...  # targets are masks (n, h, w)
