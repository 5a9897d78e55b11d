"""Colour jitter and colour operations on batches of RGB images, with a strength for each sample.

The operations are torchvision's (transforms.v2.functional), which takes one strength for a whole batch. uint8 images are computed
in float and truncated, not rounded, as in torchvision and Pillow. Float images have values 0 … 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Annotated

import annotated_types

from drivetrain.augment import base
from drivetrain.augment.base import Augment, in_chunks, per_sample, require_images, where
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import NonNegative, RunSpec
from drivetrain.core.step import rng

REACH = 6  # pixels of a blur to each side
Half = Annotated[float, annotated_types.Ge(0), annotated_types.Le(0.5)]


class ColorJitter(Augment):
    """Random brightness, contrast, saturation and hue, always in this order (torchvision's ColorJitter shuffles them)."""

    effect = "changes"
    changes = "the colours of training images"

    def __init__(
        self, brightness: NonNegative = 0.4, contrast: NonNegative = 0.4, saturation: NonNegative = 0.4, hue: Half = 0.1
    ) -> None:
        self.brightness, self.contrast, self.saturation, self.hue = brightness, contrast, saturation, hue

    def validate(self, run: RunSpec) -> Iterator[str]:
        if not (self.brightness or self.contrast or self.saturation or self.hue):
            yield "augment=color_jitter with all its strengths 0 does nothing: set one of them or leave color_jitter out"

    def validate_shape(self, run: RunSpec, shape: Sequence[int]) -> Iterator[str]:
        yield from require_images(run, shape, "color_jitter", rgb=True)

    def __call__(self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor) -> torch.Tensor:
        draws = [rng.uniform(seed, epoch, indices, stream) for stream in base.JITTER]
        spreads = (self.brightness, self.contrast, self.saturation)
        factors = [
            max(0.0, 1 - spread) + draw * (1 + spread - max(0.0, 1 - spread))
            for spread, draw in zip(spreads, draws, strict=False)
        ]
        return in_chunks(self.jitter, x, *factors, (2 * draws[3] - 1) * self.hue)

    def jitter(
        self, x: torch.Tensor, bright: torch.Tensor, contrasts: torch.Tensor, colour: torch.Tensor, turn: torch.Tensor
    ) -> torch.Tensor:
        """Apply the four operations: three factors (n,), and the rotation of the hue (n,) in turns."""
        out = x.float() if x.dtype == torch.uint8 else x
        max_value = 255.0 if x.dtype == torch.uint8 else 1.0
        for spread, operation, strength in (
            (self.brightness, brightness, bright),
            (self.contrast, contrast, contrasts),
            (self.saturation, saturation, colour),
        ):
            out = operation(out, strength, max_value) if spread else out
        return (hue(out, turn) if self.hue else out).to(x.dtype)


def gray(x: torch.Tensor) -> torch.Tensor:
    """Return the luma (n, 1, h, w) of float images (ITU-R 601)."""
    r, g, b = x.split(1, 1)
    found: torch.Tensor = (r * 0.2989).add_(g, alpha=0.587).add_(b, alpha=0.114)
    return found


def brightness(x: torch.Tensor, factor: torch.Tensor, max_value: float) -> torch.Tensor:
    """Multiply float images by a factor (n,) and clip them at `max_value`."""
    return (x * per_sample(factor)).clamp_(0, max_value)


def contrast(x: torch.Tensor, factor: torch.Tensor, max_value: float) -> torch.Tensor:
    """Blend float images with their mean luma by a factor (n,): 0 gives the mean, 1 the image, more exaggerates."""
    luma = gray(x)
    mean = (luma.floor_() if max_value == 255 else luma).mean((1, 2, 3), keepdim=True)
    return _blend(x, mean, factor, max_value)


def saturation(x: torch.Tensor, factor: torch.Tensor, max_value: float) -> torch.Tensor:
    """Blend float images with their own grey by a factor (n,)."""
    luma = gray(x)
    return _blend(x, luma.floor_() if max_value == 255 else luma, factor, max_value)


def sharpness(x: torch.Tensor, factor: torch.Tensor, max_value: float) -> torch.Tensor:
    """Blend float images with a smoothed copy by a factor (n,). Pixels at the border do not change."""
    if min(x.shape[2:]) < 3:
        return x
    inner = x[:, :, 1:-1, 1:-1]
    # A 3×3 sum with the middle counted five times. Adding shifted images takes a sixth of a pooling kernel's time.
    smooth = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    smooth = (smooth[..., :-2] + smooth[..., 1:-1]).add_(smooth[..., 2:]).add_(inner, alpha=4).div_(13)
    out = x.clone()
    out[:, :, 1:-1, 1:-1] = _blend(inner, smooth.round_() if max_value == 255 else smooth, factor, max_value)
    return out


def _blend(x: torch.Tensor, other: torch.Tensor, factor: torch.Tensor, max_value: float) -> torch.Tensor:
    factor = per_sample(factor)
    return (x * factor).add_(other * (1 - factor)).clamp_(0, max_value)


def hue(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotate the hue of float images by `turn` (n,) turns; value and chroma stay (HSV)."""
    r, g, b = x.split(1, 1)
    high, low = torch.maximum(torch.maximum(r, g), b), torch.minimum(torch.minimum(r, g), b)
    chroma = high - low
    share = chroma.clamp(min=1e-12).reciprocal_()  # for grey, whose chroma is 0, all differences are 0
    place = torch.where(high == g, (b - r).mul_(share).add_(2), (r - g).mul_(share).add_(4))
    place = torch.where(high == r, (g - b).mul_(share), place).add_(6 * per_sample(turn))  # sixths of the circle from red
    place.sub_((place / 6).floor_().mul_(6))
    shares = torch.cat([(place - 3).abs_().sub_(1), 2 - (place - 2).abs_(), 2 - (place - 4).abs_()], 1)
    return shares.clamp_(0, 1).mul_(chroma).add_(low)


def on_bytes(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Turn an operation on float images into one on uint8 images."""
    return lambda x, factor: operation(x.float(), factor, 255.0).to(torch.uint8)


def posterize(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Keep only the first `bits` (n,) bits of uint8 images."""
    return x & per_sample((256 - torch.exp2(8 - bits)).to(torch.uint8))


def solarize(x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Invert the values of uint8 images from a threshold (n,) on."""
    return where(x >= per_sample(threshold.ceil().to(torch.uint8)), 255 - x, x)


def autocontrast(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Stretch each channel of uint8 images to 0 … 255."""
    low, high = (t.float() for t in (x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)))
    flat = high == low
    scale = torch.where(flat, 1.0, (high - low) * (1.0 / 255.0))
    return (x - torch.where(flat, 0.0, low)).div_(scale).clamp_(0, 255).to(torch.uint8)


def equalize(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Equalize the histogram of each channel of uint8 images, as Pillow does it."""
    flat = x.flatten(2).long()
    counts = torch.zeros(*x.shape[:2], 256, dtype=torch.long, device=x.device)
    counts.scatter_add_(2, flat, torch.ones((), dtype=torch.long, device=x.device).expand_as(flat))
    below = counts.cumsum(2)
    top = counts.gather(2, below.argmax(2, keepdim=True))  # the count of the largest value
    step = (flat.shape[2] - top) // 255
    table = (below - counts + step // 2) // step.clamp(min=1)
    table = torch.where(step == 0, torch.arange(256, device=x.device), table.clamp_(max=255))
    return table.to(torch.uint8).gather(2, flat).view_as(x)


def blur(x: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """Blur uint8 images by Gaussian kernels of these deviations (n,) in pixels, up to 2, cut off at three times that.

    Outside of an image its border is reflected, as in torchvision's gaussian_blur; for an image too small for that, it is
    repeated.
    """
    places = torch.arange(-REACH, REACH + 1, device=x.device)
    weights = torch.softmax(-((places / deviation.unsqueeze(1)) ** 2) / 2, 1).unbind(1)
    out = x.float()
    for dimension in (2, 3):
        pad = [REACH, REACH, 0, 0] if dimension == 3 else [0, 0, REACH, REACH]
        size = x.shape[dimension]
        out = torch.nn.functional.pad(out, pad, "reflect" if size > REACH else "replicate")
        shifted = (out.narrow(dimension, i, size) * per_sample(weight) for i, weight in enumerate(weights))
        out = reduce(lambda total, part: total.add_(part), shifted)
    return out.round_().clamp_(0, 255).to(torch.uint8)
