"""The interface of augmentations: functions of a whole batch, on any device, that draw for each sample and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.option import Effect, Option, RunSpec
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import CropBox, PipelineParts

CHUNK = 2**18  # values per chunk on a CPU: a chunk and its float copy fit into the cache


class Augment(Option, groups.Augment):
    """augment=none: samples as they are."""

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "exact"
    draws_on_cpu = False  # `__call__` gets its indices on the CPU, where drawn numbers are readable without a wait

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if (shape := run.data.shape()) is not None:
            yield from self.validate_shape(run, shape)

    def validate_shape(self, run: RunSpec, shape: Sequence[int]) -> Iterator[str]:
        """Yield the reasons why inputs of this shape cannot be augmented.

        Called again after loading where only the data has the shape.
        """
        yield from ()

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        """Augment a batch (n, c, h, w). Sample i draws only from (seed, epoch, indices[i])."""
        return x

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, pipeline: PipelineParts, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Change a batch as one step of a pipeline; return its inputs, targets and sample indices (n,).

        x may be changed in place: it belongs to the pipeline. `indices` is on the device of x.
        """
        own = request.indices_to_read() if self.draws_on_cpu else indices
        return self(x, pipeline.seed, request.epoch, own), y, indices

    def crop_boxes(self, seed: int, epoch: int, indices: torch.Tensor) -> Sequence[CropBox] | None:
        """Return a source's crops of the samples `indices` (n,) in decoding; None: whole images."""
        return None


def require_images(run: RunSpec, shape: Sequence[int], option: str, rgb: bool = False) -> Iterator[str]:
    """Yield a problem if inputs of this shape are not images, or, with `rgb`, not RGB images with values 0 … 255.

    The user's own data declares no range of values: it is assumed to fit.
    """
    max_value = run.data.max_value if run.data.shape() is not None else 255
    setting, data = f"augment=[{option}]", run.named("data")
    if len(shape) != 3:
        yield f"{setting} works on images (channels, height, width); {data} gives {list(shape)}: leave {option} out"
    elif rgb and (shape[0] != 3 or max_value != 255):
        values = f"values up to {max_value:g}" if max_value is not None else "values without a bound"
        yield (
            f"{setting} works on RGB images with values 0 … 255; {data} gives {shape[0]} channels and {values}: "
            f"set data to photographs (data=imagefolder), or leave {option} out"
        )


def require_still_targets(run: RunSpec, option: str) -> Iterator[str]:
    """Yield a problem if the run's targets are masks: this option would move pixels of images and not of masks."""
    if run.data.targets == "mask":
        yield (
            f"augment=[{option}] moves the pixels of images, but the masks of {run.named('data')} would stay: set "
            "augment=[flip_crop], which moves both"
        )


def in_chunks(function: Callable[..., torch.Tensor], x: torch.Tensor, *each: torch.Tensor) -> torch.Tensor:
    """Return function(x, *each), computed on a CPU for chunks of the samples: all arguments have n rows."""
    size = max(1, CHUNK // max(1, x[0].numel()))
    if x.device.type != "cpu" or len(x) <= size:
        return function(x, *each)
    return torch.cat([function(*chunk) for chunk in zip(*(t.split(size) for t in (x, *each)), strict=True)])


def per_sample(values: torch.Tensor) -> torch.Tensor:
    """Reshape values (n,) to (n, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)


def where(mask: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return torch.where(mask, a, b). For uint8 it selects by bits, which takes a fiftieth of torch.where's time on a CPU."""
    if a.dtype != torch.uint8 or b.dtype != torch.uint8:
        return torch.where(mask, a, b)
    bits = mask.view(torch.uint8).neg()  # 0 or 255
    return (a ^ b).bitwise_and_(bits).bitwise_xor_(b)


FLIP = range(10, 11)
SHIFT = range(11, 13)  # down, right
TRIES = 10  # of a random box
CROP = range(20, 20 + 2 * TRIES + 2)  # area and aspect ratio of each try, then the position down and right
ERASE = range(50, 50 + 2 * TRIES + 4)  # the same, then whether to erase, and the noise
JITTER = range(80, 84)  # brightness, contrast, saturation, hue
OPERATION = range(100, 120)  # one for each operation of a sequence
SIGN = range(120, 140)  # the same
MIXER = range(140, 141)  # which of several mixing options
MIXUP = range(142, 143)  # the share
CUTMIX = range(144, 147)  # the same, then the position down and right
TRIVIAL = range(150, 153)  # the operation, its strength and sign
THREE = range(153, 155)  # the operation, and the deviation of a blur
