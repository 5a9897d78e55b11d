"""Samples of a finished run with what its model says of them, on its page: the worst ones, and some at random."""

from __future__ import annotations

import base64
import io
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core import tables
from drivetrain.core.errors import DataError, UserError
from drivetrain.run.reader import RunFiles
from drivetrain.ui.pages import charts, classes
from drivetrain.ui.pages.charts import Curve
from drivetrain.ui.sheet import Part, Section, Table, escape, remarks, under, words
from drivetrain.ui.terminal import number

if TYPE_CHECKING:
    import numpy as np
    import torch

    from drivetrain.inference.inputs import One
    from drivetrain.inference.loaded import LoadedRun
    from drivetrain.inference.predictions import Predictions

SIDE = 96  # pixels of a tile at most
CHARACTERS = 400  # of a text
OF_SET = "test"
MOST_NUMBERS = 4  # of a target, that are drawn
IGNORED = -100  # a target that no loss counts


@dataclass
class Sample:
    """A sample, what it is, and what the model says of it."""

    name: str
    x: Any
    target: str
    prediction: str
    right: bool | None  # None: a matter of degree
    loss: float  # by which the worst are found
    pairs: Sequence[tuple[float, float]] = ()  # each true number or class, and what was predicted


def sections(run: RunFiles, count: int, most: int) -> list[Section]:
    """What a run's page has of its samples: `count` of the worst of `most` at random, as many others, and how predictions lie.

    Where there are none, it says why.
    """
    title = "Samples with predictions"
    try:
        loaded, samples, total = _samples(run.path, most)
    except (UserError, DataError) as error:
        return under(title, words(f"There are none: {error}"))
    except Exception as error:  # the run's own code, or its data, may fail in any way: the page has more to show
        said = next(iter(str(error).splitlines()), "")
        return under(title, words(f"There are none: {type(error).__name__}: {said}"))
    if not samples:
        return under(title, words("There are none: the set is empty."))
    worst = sorted(samples, key=lambda sample: -sample.loss)[:count]
    looked_at = f"{len(samples):,}{f' at random of {total:,}' if len(samples) < total else ''} of the {OF_SET} set"
    measured = remarks(f"The worst are those with the largest loss, of {looked_at}.")
    show = _shown_as(loaded)
    at_random = under("At random", show(samples[:count]), level=3)  # they came in random order
    shown = under(title, measured, *under("The worst", show(worst), level=3), *at_random)
    counted = tables.of_result(run.result.tables)[1] if run.result is not None else {}
    if loaded.kind == "class" and not any(map(tables.is_confusion, counted.values())):
        return [*shown, *classes.sections({"confusion_matrix": _confusion(samples, loaded.classes)}, looked_at)]
    return [*shown, *_scatter(samples, looked_at)] if loaded.kind == "values" else shown


def _confusion(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, Any]:
    """How often which class was taken for which, as metrics=confusion_matrix counts it."""
    counts = Counter(pair for sample in samples for pair in sample.pairs)
    return {"rows": names, "columns": names, "values": [[counts[n, m] for m in range(len(names))] for n in range(len(names))]}


def _scatter(samples: Sequence[Sample], looked_at: str) -> list[Section]:
    """Numbers that were predicted against the true ones, and how far they are off."""
    drawn = []
    for n in range(min(MOST_NUMBERS, len(samples[0].pairs))):
        true, number = zip(*(sample.pairs[n] for sample in samples), strict=True)
        of = f", number {n + 1} of {len(samples[0].pairs)}" if len(samples[0].pairs) > 1 else ""
        ends = [(end, end) for end in (min(true), max(true))]
        residuals = [(y, y - x) for x, y in zip(true, number, strict=True)]
        zero = [(end, 0.0) for end in (min(number), max(number))]
        dots = [Curve("samples", list(zip(true, number, strict=True))), Curve("as they are", ends)]
        drawn += [
            charts.curves(f"Predicted against true{of}", dots, "true", dots=1),
            charts.curves(
                f"Residuals: predicted less true{of}", [Curve("samples", residuals), Curve("none", zero)], "predicted", dots=1
            ),
        ]
    return under(f"Predictions, {looked_at}", Part(charts.grid(drawn)))


def _samples(run_dir: Path, most: int) -> tuple[LoadedRun, list[Sample], int]:
    """The run, samples of the set with their predictions in random order, and how many the set has."""
    from drivetrain.inference.inputs import grouped, read_in_batches
    from drivetrain.inference.loaded import load

    loaded = load(run_dir)
    items, total = loaded.items_of(OF_SET, 1)
    chosen = set(random.Random(0).sample(range(total), min(total, most)))
    picked = (item for n, item in enumerate(items) if n in chosen)
    found: list[Sample] = []
    for batch in read_in_batches(picked, min(64, loaded.batch_size())):
        for places, x in grouped(batch):
            predicted = loaded.predict_ready(loaded.transforms(x))
            found += _judged([read.one(n) for read, n in places], predicted, loaded)
    random.Random(0).shuffle(found)
    return loaded, found, total


def _judged(reads: Sequence[One], predicted: Predictions, loaded: LoadedRun) -> Iterator[Sample]:
    """The samples of a batch with their losses."""
    import torch

    for n, read in enumerate(reads):
        if read.target is None:
            continue
        output, target = predicted.output[n].float().cpu(), torch.tensor(read.target)
        if loaded.kind == "class":
            shares = output.softmax(-1)
            best = int(shares.argmax())
            loss, right = -float(shares[int(target)].clamp_min(1e-30).log()), best == int(target)
            said = f"{loaded.classes[best]} ({float(shares[best]):.0%})"
            yield Sample(read.name, read.x, loaded.classes[int(target)], said, right, loss, [(int(target), best)])
        elif loaded.kind == "labels":
            shares = output.sigmoid().clamp(1e-6, 1 - 1e-6)
            loss = float(torch.nn.functional.binary_cross_entropy(shares, target.float()))
            said = ", ".join(name for name, on in zip(loaded.classes, (shares > 0.5).tolist(), strict=True) if on) or "none"
            right = bool(((shares > 0.5) == (target > 0.5)).all())
            yield Sample(read.name, read.x, str(loaded.name_target(read.target)) or "none", said, right, loss)
        elif loaded.kind == "values":
            wide = float((output.flatten()[: target.numel()] - target.float().flatten()).abs().mean())
            found = torch.as_tensor(predicted.labels)[n].flatten().tolist()
            true = loaded.in_units(target).flatten().tolist()
            is_, said = (", ".join(map(number, values)) for values in (true, found))
            yield Sample(read.name, read.x, is_, said, None, wide, list(zip(true, found, strict=False)))
        elif loaded.kind == "mask":
            counted = target != IGNORED
            share = float((output.argmax(0) == target)[counted].float().mean()) if counted.any() else 1.0
            yield Sample(read.name, (read.x, output.argmax(0)), "", f"{share:.1%} of the pixels right", None, 1 - share)
        elif loaded.kind == "tokens":
            yield _of_text(read, output, target, loaded)


def _of_text(read: One, output: torch.Tensor, target: torch.Tensor, loaded: LoadedRun) -> Sample:
    """A piece of text, of which each token is predicted from those before it."""
    import torch

    counted = target != IGNORED
    losses = torch.nn.functional.cross_entropy(output, target.long(), ignore_index=IGNORED, reduction="none")[counted]
    right = (output.argmax(-1) == target)[counted].float()
    said = f"{float(right.mean()):.0%} of the tokens right" if len(losses) else "–"
    return Sample(read.name, read.x, "", said, None, float(losses.mean()) if len(losses) else 0.0)


def _shown_as(loaded: LoadedRun) -> Any:
    """What shows samples of this run: pictures, texts, or names alone."""
    shape = loaded.transforms.shape
    if loaded.transforms.tokens:
        return lambda samples: _table(samples, lambda sample: loaded.text_of(sample.x), "text")
    if shape is not None and len(shape) == 3 and shape[0] in (1, 3):
        top = loaded.transforms.max_value
        return lambda samples: Part(f'<ul class="tiles">{"".join(_tile(sample, top) for sample in samples)}</ul>')
    return lambda samples: _table(samples, lambda sample: sample.name, "sample")


def _table(samples: Sequence[Sample], text: Any, header: str) -> Table:
    has_target = any(sample.target for sample in samples)
    rows = []
    for sample in samples:
        shown = str(text(sample) or sample.name)
        shown = shown if len(shown) <= CHARACTERS else f"{shown[:CHARACTERS]} …"
        rows.append([shown, *([sample.target] if has_target else []), sample.prediction, f"{sample.loss:.4g}"])
    columns = [header, *(["is"] if has_target else []), "predicted", "loss"]
    return Table(columns, rows, "Samples with predictions", ("is", "predicted") if header == "text" else ())


def _tile(sample: Sample, top: float | None) -> str:
    from drivetrain.logger import drawing

    x, mask = sample.x if isinstance(sample.x, tuple) else (sample.x, None)
    picture = drawing.pixels(x.cpu().numpy(), top)
    if mask is not None:
        picture = drawing.with_mask(picture, mask.numpy())
    kind, mark = ("", "") if sample.right is None else ("right", "✓ ") if sample.right else ("wrong", "✗ ")
    target = f"{escape(sample.target)}<br>" if sample.target else ""
    name = f'<br><span class="soft">{escape(sample.name)}</span>'
    said = escape(f"{sample.name}: {sample.target}, predicted {sample.prediction}")
    return (
        f'<li><img alt="{said}" src="data:image/png;base64,{base64.b64encode(_png(picture)).decode()}">'
        f'{target}<span class="{kind}">{mark}{escape(sample.prediction)}</span>{name}</li>'
    )


def _png(picture: np.ndarray) -> bytes:
    """Pixels (h, w, 3), uint8, as a PNG file of at most SIDE pixels a side."""
    from PIL import Image

    image, file = Image.fromarray(picture), io.BytesIO()
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE), Image.Resampling.BOX)  # each pixel is the mean of those that it stands for
    image.save(file, "PNG")
    return file.getvalue()
