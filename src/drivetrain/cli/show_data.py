"""The page of `drivetrain show --data FILE`: what training will see of images."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.microbatch import Request
from drivetrain.core.option import RunSpec
from drivetrain.core.source import Source
from drivetrain.data.base import Splits
from drivetrain.loader.base import Pipeline
from drivetrain.logger.drawing import BLACK, Tile, grid, pixels, with_mask
from drivetrain.ui.sheet import Part, Section, Sheet, Table, escape, heading, words

SHOWN, CLASSES = 12, 30  # samples that are drawn, classes that are counted
GAP = 4  # pixels between a sample and what becomes of it


def sheet_of(run: RunSpec) -> Sheet:
    """Return what the training of a run will see: its sets, and samples beside what augmentation makes of them."""
    data = run.data.load_sets(torch.device("cpu"))
    shape = data.shape
    if not isinstance(shape, tuple) or len(shape) != 3 or shape[0] not in (1, 3) or data.images is not None:
        raise UserError(f"drivetrain show --data draws images, and {run.named('data')} has none: leave --data out")
    others = {f"{split} {name}".rstrip(): each for split in ("validation", "test") for name, each in data.sets(split).items()}
    sets = {"training": data.train, **others}
    said = [line for line in (data.inputs, *data.doubts) if line]
    counts = Table.of(_counts(data, sets), name="samples")
    picture = Part(_image(_tiles(run, data)))
    beside = "Samples of the training set, and beside each what augmentation makes of it in the first epoch"
    outputs = "classes" if run.data.targets in ("class", "mask", "pair") else "outputs"
    answer = f"{len(data.train):,} training samples, {data.classes:,} {outputs}, images of {shape[2]}×{shape[1]}"
    sections: list[Section] = [heading("What was read"), words(*said), counts, heading(beside), picture]
    return Sheet(f"{run.named('data')} – drivetrain show", answer, sections)


def _counts(data: Splits, sets: dict[str, Source]) -> dict[str, list[str]]:
    """Return the number of samples of each set, and of each class where these are known."""
    columns = {"set": list(sets), "samples": [f"{len(source):,}" for source in sets.values()]}
    labels = [source.labels() for source in sets.values()]
    for number, name in enumerate(list(data.names or map(str, range(data.classes)))[:CLASSES]):
        columns[str(name)] = ["–" if each is None else f"{int((each == number).sum()):,}" for each in labels]
    return columns if any(each is not None for each in labels) else dict(list(columns.items())[:2])


def _tiles(run: RunSpec, data: Splits) -> Iterator[Tile]:
    """Yield a tile for each of some samples: as it is read, and as training gets it, with its target."""
    count = min(SHOWN, len(data.train))
    chosen = torch.arange(count) * len(data.train) // count
    steps = tuple(run.augment)
    pipeline = Pipeline(data.train, steps, None, run.runtime.seed, data.classes, masks=run.data.targets == "mask")
    mixed = chosen.roll(max(1, count // 3)) if any(step.mixes for step in steps) else None
    request = Request(0, chosen, 1.0, mix_with=mixed)
    (before, own), (x, y) = data.train.fetch(chosen), pipeline(request)
    assert isinstance(before, torch.Tensor)
    assert isinstance(own, torch.Tensor)
    for image, target, made, became in zip(before, own, x, y, strict=False):
        halves = [_drawn(image, target, run), _drawn(made, became, run)]
        high, wide = halves[0].shape[0], GAP
        blank = np.full((high, wide, 3), 255, np.uint8)
        yield Tile(np.concatenate([halves[0], blank, halves[1]], 1), [(line, BLACK) for line in _lines(run, data, became)])


def _drawn(image: torch.Tensor, target: torch.Tensor, run: RunSpec) -> Any:
    picture = pixels(image.float().numpy(), run.data.max_value)
    return with_mask(picture, target.numpy()) if target.ndim > 1 else picture


def _lines(run: RunSpec, data: Splits, target: torch.Tensor) -> list[str]:
    """Return a target as the loss sees it, in words: classes with their shares, numbers, or the shares of a mask's pixels."""
    names = list(data.names or map(str, range(data.classes)))
    if target.ndim > 1:
        counted = target[target >= 0]
        shares = torch.bincount(counted.flatten(), minlength=data.classes) / max(1, counted.numel())
    elif target.ndim == 0 and not target.is_floating_point():
        return [names[int(target)]]
    elif run.data.targets == "values":
        return [f"{float(value):.4g}" for value in target.flatten()[:2]]
    else:
        shares = target.flatten().float()
    largest = shares.argsort(descending=True)[:2].tolist()
    return [f"{names[n]}: {100 * float(shares[n]):.2g} %" for n in largest if shares[n] != 0] or ["none"]


def _image(tiles: Iterator[Tile]) -> str:
    """Return the picture of tiles as HTML."""
    out, drawn = io.BytesIO(), list(tiles)
    grid(drawn).save(out, "PNG")
    text = f"{len(drawn)} samples: {'; '.join(', '.join(line for line, _ in tile.lines) for tile in drawn)}"
    content = base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{escape(text)}" style="max-width:100%" src="data:image/png;base64,{content}">'
