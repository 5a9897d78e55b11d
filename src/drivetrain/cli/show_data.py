"""The page of `drivetrain show --data FILE`: a preview of the training data."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from drivetrain.augment import Augment
from drivetrain.core.errors import DataError
from drivetrain.core.options.option import RunSpec
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import Source
from drivetrain.data.base import IGNORE_INDEX, Data, Splits, Tensors, twice
from drivetrain.data.decoding import ImageFileSource, open_image, values_of
from drivetrain.loader.base import Pipeline
from drivetrain.logger.drawing import BLACK, Tile, grid, in_words, pixels, with_mask
from drivetrain.ui.sheet import PagePart, Section, Sheet, Table, escape, under, words

SHOWN, CLASSES = 12, 30  # samples drawn, classes counted
LOOKED_AT = 100  # samples or files examined for their range of values
CHARACTERS = 200  # of a text
LENGTHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in all": torch.sum, "shortest": torch.min, "median": torch.median, "longest": torch.max,
}  # fmt: skip
GAP = 4  # pixels between a sample and its augmentation


def sheet_of(run: RunSpec) -> Sheet:
    """Return a preview of a run's training data: its sets, the encoding of their columns or texts, and samples."""
    data = Data.of(run).load_sets(torch.device("cpu"))
    others = {f"{split} {name}".rstrip(): each for split in ("validation", "test") for name, each in data.sets(split).items()}
    sets = {"training": data.train, **others}
    said = [line for line in (data.inputs, *data.doubts, *_remarks(sets)) if line]
    sections: list[Section] = [*under("What was read", words(*said)), Table.of(_counts(run, data, sets), name="samples")]
    if columns := Data.of(run).describe_columns(data):
        table = Table.of(columns, name="columns", prose=("became", "values", "examples"), spare=("examples", "values"), most=40)
        sections += under("What each column became", table)
    if isinstance(data.train, ImageFileSource):
        sections += under("Files", Table.of(_files(data.train), name="files"))
    shape, what = data.shape, ""
    if isinstance(shape, tuple) and len(shape) == 3 and shape[0] in (1, 3) and data.images is None:
        what = f", images of {shape[2]}×{shape[1]}"
        beside = "Samples of the training set, each next to its augmentation in the first epoch"
        sections += under(beside, PagePart(_image(_tiles(run, data))))
    else:
        sections += _lengths(sets, "tokens" if run.data.tokens else "positions")
        texts = _texts(run, data) if run.data.tokens is not False or data.dtype is not None else {}
        title = "Texts of the training set" if texts else "Inputs and targets of the training set"
        sections += under(title, Table.of(texts or _values(data), name="samples of training", prose=("text", "values")))
    several = "classes" if run.data.targets in ("class", "mask", "pair", "words") else "outputs"
    answer = f"{len(data.train):,} training samples, {'one output' if data.classes == 1 else f'{data.classes:,} {several}'}{what}"
    return Sheet(f"{run.named('data')} – drivetrain show", answer, sections)


def _counts(run: RunSpec, data: Splits, sets: Mapping[str, Source]) -> dict[str, list[str]]:
    """Return the number of samples of each set, and of each class or label if known."""
    columns = {"set": list(sets), "samples": [f"{len(source):,}" for source in sets.values()]}
    counts = [_of_each(source, data.classes, run.data.targets == "labels") for source in sets.values()]
    if all(each is None for each in counts):
        return columns
    names = list(data.names or map(str, range(data.classes)))[:CLASSES]
    return columns | {str(n): ["–" if each is None else f"{int(each[at]):,}" for each in counts] for at, n in enumerate(names)}


def _of_each(source: Source, classes: int, several: bool) -> torch.Tensor | None:
    """Return the number of samples per class or label; None if unknown without reading them."""
    if (labels := source.labels()) is not None:
        return torch.bincount(labels.long(), minlength=classes)
    targets = source.y if isinstance(source, Tensors) else source.targets if isinstance(source, ImageFileSource) else None
    return (targets > 0).sum(0) if several and isinstance(targets, torch.Tensor) and targets.ndim == 2 else None


def _remarks(sets: Mapping[str, Source]) -> Iterator[str]:
    """Yield the sets that share samples with training, and the unreadable ones of some evenly spread files."""
    train = sets["training"]
    for name, source in sets.items():
        if source is not train and (count := twice(train, source)):
            yield f"in training too: {count:,} of the {len(source):,} samples of {name}, so its figures are too good"
        looked_at = _chosen(source, LOOKED_AT).tolist() if isinstance(source, ImageFileSource) else []
        if problems := [problem for index in looked_at if (problem := _problem(source, index))]:
            yield f"{len(problems)} of {len(looked_at)} files of {name} cannot be read, the first: {problems[0]}"


def _problem(source: Source, index: int) -> str:
    """Return why a file cannot be read; "" if it can."""
    assert isinstance(source, ImageFileSource)
    try:
        source.decoded(index)
    except DataError as error:
        return str(error)
    return ""


def _files(source: ImageFileSource) -> dict[str, list[str]]:
    """Return the kinds of some files, spread evenly: format and mode, number, sizes and range of values."""
    found: dict[str, list[tuple[int, int, float, float]]] = {}
    for index in _chosen(source, LOOKED_AT).tolist():
        if not _problem(source, index):
            with open_image(source.content(index), source.name(index)) as image:
                values = values_of(image)
                values = np.asarray(image.convert("RGB")) if values is None else values
                one = (*image.size, float(values.min()), float(values.max()))
                found.setdefault(f"{image.format} {image.mode}", []).append(one)
    columns: dict[str, list[str]] = {"kind": list(found), "files": [f"{len(each):,}" for each in found.values()]}
    for name, at in {"width": (0, 0), "height": (1, 1), "values": (2, 3)}.items():
        ends = [(min(e[at[0]] for e in each), max(e[at[1]] for e in each)) for each in found.values()]
        columns[name] = [f"{low:g} to {high:g}" if low < high else f"{low:g}" for low, high in ends]
    return columns


def _lengths(sets: Mapping[str, Source], unit: str) -> list[Section]:
    """Return the table of the sets' lengths; nothing if all samples have one length."""
    known = {name: source.lengths for name, source in sets.items() if source.lengths is not None and len(source)}
    if not known:
        return []
    documents = [sets[name].identities() for name in known]
    columns: dict[str, list[str]] = {
        "set": list(known),
        "samples": [f"{len(each):,}" for each in known.values()],
        "documents": ["–" if each is None else f"{len(set(each)):,}" for each in documents],
        **{title: [f"{int(of(each)):,}" for each in known.values()] for title, of in LENGTHS.items()},
    }
    return under(f"Lengths of the samples, in {unit}", Table.of(columns, name="lengths").used())


def _texts(run: RunSpec, data: Splits) -> dict[str, list[str]]:
    """Return some samples as text with their lengths and targets; {} if inputs are not text."""
    columns: dict[str, list[str]] = {"sample": [], "text": [], "tokens": [], "target": []}
    for index in _chosen(data.train).tolist():
        x, y = data.train.fetch(torch.tensor([index]))
        if not isinstance(x, torch.Tensor) or x.ndim != 2 or (text := Data.of(run).decode(x[0].tolist(), data)) is None:
            return {}
        lines = in_words(y[0], run.data.targets, data.names) if y.ndim < 2 else [_of_tokens(run, data, y[0])]
        short = text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}…"
        for cells, cell in zip(
            columns.values(), (f"{index}", " ".join(short.split()), f"{x.shape[1]}", ", ".join(lines)), strict=True
        ):
            cells.append(cell)
    return columns


def _of_tokens(run: RunSpec, data: Splits, targets: torch.Tensor) -> str:
    """Return the targets of a text's tokens in words: the classes of counted tokens, or the learnt next tokens."""
    counted = targets[targets != IGNORE_INDEX].tolist()
    if run.data.targets != "tokens":
        return ", ".join(str(data.names[number]) if data.names else str(number) for number in counted[:SHOWN])
    learnt = Data.of(run).decode(counted, data) if len(counted) < len(targets) else None
    return "the next token" if learnt is None else f"the next token of {' '.join(learnt.split())[:CHARACTERS]!r}"


def _values(data: Splits) -> dict[str, list[str]]:
    """Return the parts of some samples: shapes, types and the range of values."""
    batch = data.train.fetch(_chosen(data.train, LOOKED_AT))
    parts = {
        f"{part}{'.' if name else ''}{name}": t
        for part, tree in zip("xy", batch, strict=True)
        for name, t in trees.named_leaves(tree)
    }
    return {
        "part": list(parts),
        "shape": [trees.shape_of(t) for t in parts.values()],
        "type": [str(t.dtype).removeprefix("torch.") for t in parts.values()],
        "values": [f"{float(t.min()):.4g} to {float(t.max()):.4g}" if t.numel() else "–" for t in parts.values()],
    }


def _chosen(source: Source, most: int = SHOWN) -> torch.Tensor:
    """Return the numbers of some samples, spread evenly; of a stream the first ones."""
    count = min(most, len(source))
    return torch.arange(count) if source.in_order else torch.arange(count) * len(source) // count


def _tiles(run: RunSpec, data: Splits) -> Iterator[Tile]:
    """Yield a tile for each of some samples: as read, and as augmented for training, with its target."""
    chosen = _chosen(data.train)
    count, steps = len(chosen), tuple(Augment.all_of(run))
    pipeline = Pipeline(data.train, steps, None, run.runtime.seed, data.classes, masks=run.data.targets == "mask")
    mixed = chosen.roll(max(1, count // 3)) if any(step.mixes for step in steps) else None
    request = Request(0, chosen, 1.0, mix_with=mixed)
    (before, own), (x, y) = data.train.fetch(chosen), pipeline(request)
    assert isinstance(before, torch.Tensor)
    assert isinstance(own, torch.Tensor)
    for *read, made, became in zip(before, own, x, y, strict=False):
        pictures = [(pixels(image.float().numpy(), run.data.max_value), to) for image, to in (read, (made, became))]
        left, right = (with_mask(picture, to.numpy()) if to.ndim > 1 else picture for picture, to in pictures)
        blank = np.full((left.shape[0], GAP, 3), 255, np.uint8)
        yield Tile(
            np.concatenate([left, blank, right], 1), [(line, BLACK) for line in in_words(became, run.data.targets, data.names)]
        )


def _image(tiles: Iterator[Tile]) -> str:
    """Return the picture of tiles as HTML."""
    out, drawn = io.BytesIO(), list(tiles)
    grid(drawn).save(out, "PNG")
    text = f"{len(drawn)} samples: {'; '.join(', '.join(line for line, _ in tile.lines) for tile in drawn)}"
    content = base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{escape(text)}" style="max-width:100%" src="data:image/png;base64,{content}">'
