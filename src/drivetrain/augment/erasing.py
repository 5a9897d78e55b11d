"""Random erasing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from drivetrain.augment import base
from drivetrain.augment.base import Augment, per_sample, require_images, where
from drivetrain.augment.geometry import Interval, check_intervals, random_boxes
from drivetrain.core.lazy import torch
from drivetrain.core.options.option import RunSpec, Share
from drivetrain.core.step import rng
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import PipelineParts
from drivetrain.core.step.tensors import send

LARGE = 2**15  # values of an image; on a CPU, larger images are erased one by one, to touch fewer pixels


class RandomErasing(Augment):
    """Fills a random box of some images with noise or the mean (Zhong et al. 2020), so that no single part of an image decides.

    Noise is uniform: over 0 … 255 for uint8 images, with standard deviation 1 for float images. As in the paper, images for which
    no box fits do not change.
    """

    effect = "changes"
    changes = "training images lose a part"
    draws_on_cpu = True

    def __init__(
        self,
        prob: Share = 0.25,
        scale: Interval = (0.02, 0.33),
        ratio: Interval = (0.3, 3.3),
        fill: Literal["noise", "mean"] = "noise",
    ) -> None:
        self.prob, self.scale, self.ratio, self.fill = prob, tuple(scale), tuple(ratio), fill

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from check_intervals("random_erasing", self.scale, self.ratio)
        if self.scale[1] > 1:
            yield f"augment.random_erasing.scale={list(self.scale)}: a share of the image is at most 1"
        if not self.prob:
            yield "augment.random_erasing.prob=0 does nothing: raise it or leave random_erasing out"

    def validate_shape(self, run: RunSpec, shape: Sequence[int]) -> Iterator[str]:
        yield from require_images(run, shape, "random_erasing")
        if self.fill == "noise" and run.data.max_value not in (255, None):
            yield (
                f"augment.random_erasing.fill=noise is noise of 0 … 255; {run.named('data')} has values up to "
                f"{run.data.max_value:g}: set augment.random_erasing.fill=mean"
            )

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, pipeline: PipelineParts, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = None if pipeline.normalize is None else pipeline.normalize.mean
        return self(x, pipeline.seed, request.epoch, request.indices_to_read(), mean), y, indices

    def __call__(
        self, x: torch.Tensor, seed: int, epoch: int, indices: torch.Tensor, mean: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Erase some of the images. `mean` (c, 1, 1) is the fill for fill=mean, else 0."""
        *box_streams, whether_stream, noise_stream = base.ERASE
        which = (rng.uniform(seed, epoch, indices, whether_stream) < self.prob).nonzero()[:, 0]
        if not len(which):
            return x
        indices = indices[which]
        draws = torch.stack([rng.uniform(seed, epoch, indices, stream) for stream in box_streams])
        boxes = torch.stack(random_boxes(draws, x.shape[2], x.shape[3], self.scale, self.ratio, fall_back=False), 1)
        keys = (rng.uniform(seed, epoch, indices, noise_stream) * 2**24).int()
        erase = _one_by_one if x.device.type == "cpu" and x[0].numel() >= LARGE else _at_once
        return erase(x, which, boxes, keys, None if self.fill == "noise" else _fill_value(x, mean))


def _fill_value(x: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """Return the mean (c, 1, 1) as a value of the images x; zeros where there is none."""
    value = torch.zeros((), device=x.device) if mean is None else send(mean, x.device)
    value = value if x.is_floating_point() else value.round().clamp(0, 255)
    return value.to(x.dtype).expand(len(x[0]), 1, 1)


def _one_by_one(
    x: torch.Tensor, which: torch.Tensor, boxes: torch.Tensor, keys: torch.Tensor, value: torch.Tensor | None
) -> torch.Tensor:
    """Erase the images `which` (m,) of x (n, c, h, w) in boxes (m, 4) of top, left, height, width.

    They are filled with `value` (c, 1, 1), or with noise by keys (m,).
    """
    out, places = x.clone(), _places(x)[0]
    for image, (top, left, height, width), key in zip(which.tolist(), boxes.tolist(), keys, strict=True):
        rows, cols = slice(top, top + height), slice(left, left + width)
        out[image, :, rows, cols] = noise(places[:, rows, cols], key, x.dtype) if value is None else value
    return out


def _at_once(
    x: torch.Tensor, which: torch.Tensor, boxes: torch.Tensor, keys: torch.Tensor, value: torch.Tensor | None
) -> torch.Tensor:
    """Do the same in a few kernels for all images: on a device a launch costs more than the pixels."""
    which, boxes, keys = (send(t, x.device) for t in (which, boxes, keys))
    filled = noise(_places(x), per_sample(keys), x.dtype) if value is None else value
    top, left, height, width = boxes.unbind(1)
    mask = box_mask(top, left, height, width, x.shape[2], x.shape[3])
    return x.index_copy(0, which, where(mask, filled, x.index_select(0, which)))


def box_mask(top: torch.Tensor, left: torch.Tensor, height: torch.Tensor, width: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """Return a mask (n, 1, h, w) of the pixels that lie in boxes (n,)."""
    row, col = torch.arange(h, device=top.device), torch.arange(w, device=top.device)
    top, left, height, width = (v.view(-1, 1) for v in (top, left, height, width))
    rows, cols = (row >= top) & (row < top + height), (col >= left) & (col < left + width)
    return rows.view(-1, 1, h, 1) & cols.view(-1, 1, 1, w)


def _places(x: torch.Tensor) -> torch.Tensor:
    """Number the values of an image: (1, c, h, w) int32."""
    return torch.arange(x[0].numel(), dtype=torch.int32, device=x.device).view(1, *x.shape[1:])


def noise(places: torch.Tensor, key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return noise for `places` in an image, int32, from the image's key, int32: murmur3's finaliser (Appleby 2008)."""
    bits = places * 0x27D4EB2F + key * 0x5BD1E995
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB)):
        bits = ((bits >> shift) & ((1 << (32 - shift)) - 1)).bitwise_xor_(bits).mul_(factor)
    bits = (bits >> 8) & 0xFFFFFF
    if not dtype.is_floating_point:
        return (bits >> 16).to(dtype)
    return ((bits.to(dtype) + 0.5) * 2.0**-24 - 0.5) * 12**0.5
