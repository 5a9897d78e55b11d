"""Flips, crops and affine maps of batches of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import annotated_types

from drivetrain.augment import base
from drivetrain.augment.base import Augment, require_images, require_still_targets, where
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import CountOrZero, Positive, RunSpec, Share
from drivetrain.core.step import rng
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import CropBox, PipelineParts
from drivetrain.core.step.tensors import send

LARGE = 2**15  # values of an image; a CPU mirrors larger images faster one by one (224×224: in 0.4 of the time)
Interval = Annotated[Sequence[Positive], annotated_types.Len(2, 2)]  # lowest, highest


class FlipCrop(Augment):
    """Random horizontal flips, and random crops of the image padded by reflection."""

    effect = "changes"
    changes = "the side and part of a training image that the model sees"

    def __init__(self, flip: Share = 0.5, pad: CountOrZero = 4) -> None:
        self.flip, self.pad = flip, pad

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not self.flip and not self.pad:
            yield "augment=flip_crop with flip=0 and pad=0 does nothing: set one of them or augment=none"

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.data.mirrored_changes_label and self.flip:
            yield (
                "augment=flip_crop mirrors digits, and a mirrored digit is no longer that digit: "
                "augment.flip_crop.flip=0 augment.flip_crop.pad=1 suits 8×8 digits"
            )

    def validate_shape(self, run: RunSpec, shape: Sequence[int]) -> Iterator[str]:
        if len(shape) != 3:
            yield from require_images(run, shape, "flip_crop")
        elif self.pad >= min(shape[1:]):  # the border is reflected once
            most = min(shape[1:]) - 1
            yield f"augment.flip_crop.pad={self.pad} needs images larger than that, not {list(shape)}: set it to at most {most}"

    def _flips(self, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        return rng.uniform(seed, epoch, indices, base.FLIP[0]) < self.flip

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, pipeline: PipelineParts, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if pipeline.masks:  # masks move by the same draws, pixel by pixel
            y = self(y.unsqueeze(1), pipeline.seed, request.epoch, indices).squeeze(1)
        if self.pad or not flips_one_by_one(x):
            return super().apply(x, y, indices, pipeline, request)
        return flip_(x, self._flips(pipeline.seed, request.epoch, indices)), y, indices

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        flip = self._flips(seed, epoch, indices)
        if not self.pad:
            return batch_flip(x, flip)
        span = 2 * self.pad + 1
        dy, dx = ((rng.uniform(seed, epoch, indices, stream) * span).long() for stream in base.SHIFT)
        return batch_crop(x, dy, dx, self.pad, flip if self.flip else None)


def batch_flip(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Mirror the images (n, c, h, w) where `which` (n,) is true."""
    if flips_one_by_one(x):
        return flip_(x.clone(), which)
    return where(which.view(-1, 1, 1, 1), x.flip(-1), x)


def flips_one_by_one(x: torch.Tensor) -> bool:
    """True if images (n, c, h, w) are mirrored faster one by one than all at once."""
    return x.device.type == "cpu" and x[0].numel() >= LARGE


def flip_(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Mirror the images (n, c, h, w) in place where `which` (n,) is true; return them."""
    for n in which.nonzero().flatten().tolist():
        x[n] = x[n].flip(-1)
    return x


def batch_crop(x: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, pad: int, flip: torch.Tensor | None = None) -> torch.Tensor:
    """Crop images (n, c, h, w), padded by reflection, to their size at offsets dy, dx (n,) in 0 … 2·pad.

    Images where `flip` (n,) is true are mirrored first. Both happen in one gather.
    """
    n, c, h, w = x.shape
    rows = _reflect(torch.arange(h, device=x.device) - pad + dy.view(-1, 1), h)  # (n, h)
    cols = _reflect(torch.arange(w, device=x.device) - pad + dx.view(-1, 1), w)  # (n, w)
    if flip is not None:
        cols = torch.where(flip.view(-1, 1), w - 1 - cols, cols)
    flat = rows.view(n, h, 1) * w + cols.view(n, 1, w)  # each output pixel's place in its image
    return x.flatten(2).gather(2, flat.view(n, 1, h * w).expand(n, c, h * w)).view(n, c, h, w)


def _reflect(index: torch.Tensor, size: int) -> torch.Tensor:
    """Reflect positions outside 0 … size − 1 at the border."""
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index)


class RandomResizedCrop(Augment):
    """A random crop, resized to the image's size (Szegedy et al. 2015). Crops are drawn as in torchvision's RandomResizedCrop.

    Image files are cropped while they are decoded, at their full resolution; images in memory are cropped at their own.
    """

    effect = "changes"
    changes = "the part and the scale of a training image that the model sees"
    draws_on_cpu = True  # boxes take float64, which MPS lacks, and hundreds of kernels on a few numbers

    def __init__(
        self,
        scale: Interval = (0.08, 1.0),
        ratio: Interval = (0.75, 1.3333333333333333),
        interpolation: Literal["bilinear", "bicubic"] = "bilinear",
    ) -> None:
        self.scale, self.ratio, self.interpolation = tuple(scale), tuple(ratio), interpolation

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from check_intervals("random_resized_crop", self.scale, self.ratio)
        yield from require_still_targets(run, "random_resized_crop")
        if self.scale[1] > 1:
            yield f"augment.random_resized_crop.scale={list(self.scale)}: a share of the image is at most 1"
        chosen = run.names("augment")
        if chosen and chosen[0] != "random_resized_crop":
            right = ",".join(["random_resized_crop", *(c for c in chosen if c != "random_resized_crop")])
            yield f"{run.named('augment')}: random_resized_crop crops images while they are decoded: write it first, [{right}]"

    def validate_shape(self, run: RunSpec, shape: Sequence[int]) -> Iterator[str]:
        yield from require_images(run, shape, "random_resized_crop")

    def crop_boxes(self, seed: int, epoch: int, indices: torch.Tensor) -> Sequence[CropBox]:
        draws = torch.stack([rng.uniform(seed, epoch, indices, stream) for stream in base.CROP], 1)
        return [RandomCropBox(row, self.scale, self.ratio, self.interpolation) for row in draws.tolist()]

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, pipeline: PipelineParts, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if pipeline.crops:  # the source has cropped them already, while decoding
            return x, y, indices
        return super().apply(x, y, indices, pipeline, request)

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        draws = torch.stack([rng.uniform(seed, epoch, indices, stream) for stream in base.CROP])
        return resized_crop(x, *random_boxes(draws, x.shape[2], x.shape[3], self.scale, self.ratio), self.interpolation)


def check_intervals(option: str, scale: Sequence[float], ratio: Sequence[float]) -> Iterator[str]:
    """Yield a problem for a scale or ratio whose lower end is above its upper end."""
    for setting, (low, high) in (("scale", scale), ("ratio", ratio)):
        if low > high:
            yield f"augment.{option}.{setting}={[low, high]} begins above its end: give the smaller number first"


@dataclass(slots=True)
class RandomCropBox:
    """One sample's random crop, computed when the size of its image is known."""

    draws: list[float]  # as in base.CROP
    scale: Sequence[float]
    ratio: Sequence[float]
    interpolation: str

    def __call__(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return left, top, width and height."""
        w, h = self._size(width, height)
        down, right = self.draws[-2:]
        return int(right * (width - w + 1)), int(down * (height - h + 1)), w, h

    def _size(self, width: int, height: int) -> tuple[int, int]:
        (smallest, largest), (narrow, wide) = self.scale, self.ratio
        for area, aspect in zip(self.draws[0:-2:2], self.draws[1:-2:2], strict=True):
            pixels = (smallest + area * (largest - smallest)) * width * height
            shape = math.exp(math.log(narrow) + aspect * (math.log(wide) - math.log(narrow)))
            w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
            if 0 < w <= width and 0 < h <= height:
                return w, h
        return _largest(width, height, self.ratio)


def _largest(width: int, height: int, ratio: Sequence[float]) -> tuple[int, int]:
    """Return width and height of an image's largest box with an allowed ratio, in whole pixels, at least one."""
    if width < height * ratio[0]:
        return width, max(1, round(width / ratio[0]))
    return min(width, max(1, round(height * ratio[1]))), height


def random_boxes(
    draws: torch.Tensor, height: int, width: int, scale: Sequence[float], ratio: Sequence[float], fall_back: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return top, left, height and width (n,) int64 of boxes in images of one size, from draws (2·tries + 2, n).

    The first try that fits is taken; else the largest box of an allowed ratio or, without `fall_back`, none (0×0).
    """
    area, aspect = draws[0:-2:2].double(), draws[1:-2:2].double()
    pixels = (scale[0] + area * (scale[1] - scale[0])) * width * height
    ratios = torch.exp(math.log(ratio[0]) + aspect * (math.log(ratio[1]) - math.log(ratio[0])))
    w, h = torch.sqrt(pixels * ratios).round().long(), torch.sqrt(pixels / ratios).round().long()
    good = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    whole = _largest(width, height, ratio) if fall_back else (0, 0)
    first = good.int().argmax(0, keepdim=True)
    any_good = good.any(0)
    w, h = (torch.where(any_good, v.gather(0, first)[0], size) for v, size in zip((w, h), whole, strict=True))
    down, right = draws[-2].double(), draws[-1].double()
    return (down * (height - h + 1)).long(), (right * (width - w + 1)).long(), h, w


def resized_crop(
    x: torch.Tensor, top: torch.Tensor, left: torch.Tensor, height: torch.Tensor, width: torch.Tensor, interpolation: str
) -> torch.Tensor:
    """Resize a box of each image (n, c, h, w) to h×w. For uint8, CPU and device agree to two levels of 255.

    On a CPU torch's kernel for uint8, which takes one box at a time, is 2 to 5 times as fast as anything batched (measured at
    224×224). On a device all images are resized by two batched matrix products.
    """
    if x.dtype == torch.uint8 and x.device.type == "cpu":
        out = torch.empty_like(x)
        boxes = torch.stack([top, left, height, width], 1).tolist()
        for image, target, (t, le, h, w) in zip(x.split(1), out.split(1), boxes, strict=True):
            part = image[:, :, t : t + h, le : le + w]
            target.copy_(torch.nn.functional.interpolate(part, x.shape[2:], mode=interpolation, antialias=True))
        return out
    top, left, height, width = send(torch.stack([top, left, height, width]), x.device).unbind()
    return _stretched(
        x, _resize_matrix(top, height, x.shape[2], interpolation), _resize_matrix(left, width, x.shape[3], interpolation)
    )


def _stretched(x: torch.Tensor, rows: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Return rows (n, h, h) · x (n, c, h, w) · colsᵀ (n, w, w). uint8 is rounded between the two, as in torch's kernel."""
    values = x if x.is_floating_point() else x.float()
    values = torch.matmul(values, cols.to(values.dtype).transpose(1, 2).unsqueeze(1))
    if not x.is_floating_point():
        values.round_().clamp_(0, 255)
    values = torch.matmul(rows.to(values.dtype).unsqueeze(1), values)
    return values if x.is_floating_point() else values.round_().clamp_(0, 255).to(x.dtype)


def _resize_matrix(begin: torch.Tensor, size: torch.Tensor, out: int, interpolation: str) -> torch.Tensor:
    """Return weights (n, out, out) that resize positions begin … begin + size of an axis of length `out` to its whole length."""
    n, size, begin = len(begin), size.view(-1, 1), begin.view(-1, 1)
    position = (torch.arange(out, device=begin.device) + 0.5) * (size / out) - 0.5
    low = position.floor()
    offsets, a = ((0, 1), 0.0) if interpolation == "bilinear" else ((-1, 0, 1, 2), -0.5)  # a: Keys 1981, as in Pillow
    matrix = torch.zeros(n, out, out, device=begin.device)
    total = torch.zeros(n, out, device=begin.device)
    for offset in offsets:
        at = low + offset
        d = (position - at).abs()
        if interpolation == "bilinear":
            weight = 1 - d
        else:
            weight = torch.where(d < 1, ((a + 2) * d - (a + 3)) * d * d + 1, (((d - 5) * d + 8) * d - 4) * a)
        weight = weight * ((at >= 0) & (at < size))  # pixels beyond the box do not count; the other weights are rescaled below
        total += weight
        index = (at.long().clamp(min=0).minimum(size - 1) + begin).unsqueeze(2)
        matrix.scatter_add_(2, index, weight.unsqueeze(2))
    return matrix / total.unsqueeze(2)


def warp(x: torch.Tensor, matrix: torch.Tensor, fill: float) -> torch.Tensor:
    """Map images (n, c, h, w) affinely: output pixel p is the input pixel nearest to matrix (n, 2, 3) · (p, 1), else `fill`.

    Positions are (x, y) in pixels from the image's middle. It gathers uint8 directly; grid_sample would need a float copy.
    """
    n, c, h, w = x.shape
    m = matrix.view(n, 6, 1, 1).unbind(1)
    xs = (torch.arange(w, device=x.device) - (w - 1) / 2).view(1, 1, w)
    ys = (torch.arange(h, device=x.device) - (h - 1) / 2).view(1, h, 1)
    cols = (m[0] * xs + (m[1] * ys + (m[2] + (w - 1) / 2))).round_()
    rows = (m[3] * xs + (m[4] * ys + (m[5] + (h - 1) / 2))).round_()
    inside = (cols >= 0) & (cols < w) & (rows >= 0) & (rows < h)
    flat = rows.mul_(w).add_(cols).clamp_(0, h * w - 1).long()
    out = x.flatten(2).gather(2, flat.view(n, 1, h * w).expand(n, c, h * w)).view(n, c, h, w)
    return where(inside.view(n, 1, h, w), out, torch.full((), fill, dtype=x.dtype, device=x.device))
