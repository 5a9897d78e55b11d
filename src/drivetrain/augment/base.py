"""Augmentation: functions of a whole batch, on any device, whose randomness belongs to the sample and the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import Request
from drivetrain.core.option import Option, RunSpec

PIECE = 2**18  # values that are worked on at a time on a CPU: with their float copies they stay in its cache


class Box(Protocol):
    """What to cut out of one image file before it is resized."""

    interpolation: str  # bilinear or bicubic

    def __call__(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, width and height of the box, in pixels of an upright image of this size."""
        ...


class Augment(Option):
    """augment=none: samples as they are."""

    mixes = False  # wants each sample's partner: its neighbour in the epoch's order
    on_host = False  # groups samples by their draws: those are made where their sizes are known without asking the device

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        """The batch (n, c, h, w) augmented; sample i draws from (seed, epoch, indices[i]) alone."""
        return x

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, pipeline: Any, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One step of a pipeline: inputs, targets and the sample numbers `rows` (n,) of a batch that is its own."""
        return self(x, pipeline.seed, request.epoch, request.rows() if self.on_host else rows), y, rows

    def boxes(self, seed: int, epoch: int, indices: torch.Tensor) -> Sequence[Box] | None:
        """What a source that `crops` is to cut out of each sample while it decodes it; None: nothing."""
        return None


def wants_images(run: RunSpec, option: str, colour: bool = False) -> Iterator[str]:
    """The problem of an option with the run's data, if it works on images, or on RGB images with values 0 … 255."""
    shape, peak = run.data.shape(), run.data.peak
    if shape is None:
        return
    setting, data = f"augment=[{option}]", run.named("data")
    if len(shape) != 3:
        yield f"{setting} works on images (channels, height, width); {data} gives {list(shape)}: leave {option} out"
    elif colour and (shape[0] != 3 or peak != 255):
        values = f"values up to {peak:g}" if peak is not None else "values without a bound"
        yield (
            f"{setting} works on RGB images with values 0 … 255; {data} gives {shape[0]} channels and {values}: "
            f"set data to photographs (data=imagefolder), or leave {option} out"
        )


def in_pieces(function: Callable[..., torch.Tensor], x: torch.Tensor, *each: torch.Tensor) -> torch.Tensor:
    """function(x, *each), all split along their samples; in one go where a device has the batch."""
    size = max(1, PIECE // max(1, x[0].numel()))
    if x.device.type != "cpu" or len(x) <= size:
        return function(x, *each)
    return torch.cat([function(*piece) for piece in zip(*(t.split(size) for t in (x, *each)), strict=True)])


def per_sample(values: torch.Tensor) -> torch.Tensor:
    """Values (n,) in the shape (n, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)


def where(mask: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.where, which takes 50 times as long on a CPU's bytes as choosing them by their bits."""
    if a.dtype != torch.uint8 or b.dtype != torch.uint8:
        return torch.where(mask, a, b)
    bits = mask.view(torch.uint8).neg()  # 0 or 255
    return (a ^ b).bitwise_and_(bits).bitwise_xor_(b)
