"""Draws samples as one picture of tiles with text below, and puts targets and predictions into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING

import numpy as np

from drivetrain.core.lazy import torch

if TYPE_CHECKING:
    from PIL import Image

SIDE, LINE, GAP = 96, 13, 8  # pixels: of a tile at least, of a line of text, between tiles
CHARACTERS = 16  # of a line
BLACK, GREEN, RED = (0, 0, 0), (0, 120, 0), (190, 0, 0)
COLORS = np.array([[0, 0, 0], [255, 80, 80], [80, 200, 80], [90, 140, 255], [255, 200, 60], [200, 90, 220], [70, 210, 210]])


@dataclass
class Tile:
    """A tile of the grid: pixels (h, w, 3), uint8, and the lines below it with their colours."""

    pixels: np.ndarray
    lines: list[tuple[str, tuple[int, int, int]]]


def in_words(target: torch.Tensor, kind: str | None, names: Sequence[str] | None) -> list[str]:
    """The lines for a target or a prediction: its class, at most two classes with their shares, or numbers."""
    if kind == "labels":
        return [", ".join(named((target > 0.5).nonzero(), names)) or "none"]
    if target.ndim > 1:  # a mask
        target = torch.bincount(target[target >= 0].flatten()) / max(1, int((target >= 0).sum()))
    elif not target.is_floating_point():
        return [", ".join(named(target, names))]
    elif kind == "values":
        return [f"{value:.4g}" for value in target.flatten()[:2].tolist()]
    shares, classes = target.float().topk(min(2, len(target)))
    found = zip(named(classes, names), shares.tolist(), strict=True)
    return [f"{name}: {share:.0%}" for name, share in found if share >= 0.005] or ["none"]


def named(numbers: torch.Tensor, names: Sequence[str] | None) -> list[str]:
    """The names of classes, or their numbers without names."""
    return [names[n] if names else str(n) for n in numbers.flatten().tolist()]


def pixels(x: np.ndarray, top: float | None) -> np.ndarray:
    """Return a sample (channels, h, w) as pixels (h, w, 3). `top` is the value of white; None: the largest in the sample."""
    x = x.astype(np.float64)
    low, high = (0.0, top) if top is not None else (x.min(), x.max())
    scaled = (x - low) / max(high - low, 1e-12) * 255
    return np.broadcast_to(scaled.clip(0, 255).astype(np.uint8).transpose(1, 2, 0), (*x.shape[1:], 3))


def with_mask(picture: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return pixels (h, w, 3) with the classes of `mask` (h, w) in colours; class 0 and ignored pixels stay unchanged."""
    shown = (mask > 0)[..., None]
    return np.where(shown, (picture * 0.45 + COLORS[mask.clip(0) % len(COLORS)] * 0.55).astype(np.uint8), picture)


def grid(tiles: list[Tile]) -> Image.Image:
    """Draw tiles in rows, in a grid about as high as it is wide."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(11)
    scale = max(1, SIDE // max(tiles[0].pixels.shape[:2]))  # whole: each pixel becomes a square
    height, width = (max(tile.pixels.shape[side] for tile in tiles) * scale for side in (0, 1))
    width, text = max(width, SIDE), LINE * max(len(tile.lines) for tile in tiles)
    columns = ceil(sqrt(len(tiles)))
    rows = ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (columns * (width + GAP) + GAP, rows * (height + text + GAP) + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, tile in enumerate(tiles):
        left, top = GAP + number % columns * (width + GAP), GAP + number // columns * (height + text + GAP)
        picture = Image.fromarray(np.ascontiguousarray(tile.pixels))
        sheet.paste(picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST), (left, top))
        for row, (line, color) in enumerate(tile.lines):
            shown = line if len(line) <= CHARACTERS else f"{line[: CHARACTERS - 1]}…"
            draw.text((left, top + height + row * LINE), shown, fill=color, font=font)
    return sheet
