"""Samples of a finished run with what its model says of them, on its page: the worst ones, and some at random."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import DataError, UserError
from drivetrain.ui.sheet import Part, Section, Table, escape, remarks, under, words

if TYPE_CHECKING:
    import numpy as np
    import torch

    from drivetrain.inference.inputs import One
    from drivetrain.inference.loaded import LoadedRun
    from drivetrain.inference.predictions import Predictions

LOOKED_AT = 512  # samples of a set, at random; the worst of them are shown
SIDE = 96  # pixels of a tile at most
CHARACTERS = 400  # of a text
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


def sections(run_dir: Path, count: int) -> list[Section]:
    """What a run's page has of its samples: `count` of the worst and as many others; where there are none, it says why."""
    title = "Samples with predictions"
    try:
        of_set, samples, total, show = _samples(run_dir)
    except (UserError, DataError) as error:
        return under(title, words(f"There are none: {error}"))
    except Exception as error:  # the run's own code, or its data, may fail in any way: the page has more to show
        said = next(iter(str(error).splitlines()), "")
        return under(title, words(f"There are none: {type(error).__name__}: {said}"))
    if not samples:
        return under(title, words("There are none: the set is empty."))
    worst = sorted(samples, key=lambda sample: -sample.loss)[:count]
    looked_at = f"of {total:,}" if len(samples) == total else f"of {len(samples):,} at random of {total:,}"
    measured = remarks(f"The worst are those with the largest loss, {looked_at} of the {of_set} set.")
    at_random = under("At random", show(samples[:count]), level=3)  # they came in random order
    return under(title, measured, *under("The worst", show(worst), level=3), *at_random)


def _samples(run_dir: Path) -> tuple[str, list[Sample], int, Any]:
    """The set, its samples with their predictions in random order, how many the set has, and what shows them."""
    from drivetrain.inference.inputs import grouped, read_in_batches
    from drivetrain.inference.loaded import load

    loaded = load(run_dir)
    of_set = "test"
    items, total = loaded.items_of(of_set, 1)
    chosen = set(random.Random(0).sample(range(total), min(total, LOOKED_AT)))
    picked = (item for n, item in enumerate(items) if n in chosen)
    found: list[Sample] = []
    for batch in read_in_batches(picked, min(64, loaded.batch_size())):
        for places, x in grouped(batch):
            predicted = loaded.predict_ready(loaded.transforms(x))
            found += _judged([read.one(n) for read, n in places], predicted, loaded)
    random.Random(0).shuffle(found)
    return of_set, found, total, _shown_as(loaded)


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
            yield Sample(read.name, read.x, loaded.classes[int(target)], said, right, loss)
        elif loaded.kind == "labels":
            shares = output.sigmoid().clamp(1e-6, 1 - 1e-6)
            loss = float(torch.nn.functional.binary_cross_entropy(shares, target.float()))
            said = ", ".join(name for name, on in zip(loaded.classes, (shares > 0.5).tolist(), strict=True) if on) or "none"
            right = bool(((shares > 0.5) == (target > 0.5)).all())
            yield Sample(read.name, read.x, str(loaded.name_target(read.target)) or "none", said, right, loss)
        elif loaded.kind == "values":
            wide = float((output.flatten()[: target.numel()] - target.float().flatten()).abs().mean())
            said = ", ".join(f"{value:.4g}" for value in torch.as_tensor(predicted.labels)[n].flatten().tolist())
            target_said = loaded.name_target(read.target)
            yield Sample(
                read.name, read.x, f"{target_said:.4g}" if isinstance(target_said, float) else str(target_said), said, None, wide
            )
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
    return Table(columns, rows, "Samples with predictions", ("is", "predicted"))


def _tile(sample: Sample, top: float | None) -> str:
    from drivetrain.logger import drawing

    x, mask = sample.x if isinstance(sample.x, tuple) else (sample.x, None)
    picture = drawing.pixels(x.cpu().numpy(), top)
    if mask is not None:
        picture = drawing.with_mask(picture, mask.numpy())
    kind, mark = ("", "") if sample.right is None else ("right", "✓ ") if sample.right else ("wrong", "✗ ")
    target = f"{escape(sample.target)}<br>" if sample.target else ""
    said = escape(f"{sample.name}: {sample.target}, predicted {sample.prediction}")
    return (
        f'<li><img alt="{said}" src="data:image/png;base64,{base64.b64encode(_png(picture)).decode()}">'
        f'{target}<span class="{kind}">{mark}{escape(sample.prediction)}</span></li>'
    )


def _png(picture: np.ndarray) -> bytes:
    """Pixels (h, w, 3), uint8, as a PNG file of at most SIDE pixels a side."""
    from PIL import Image

    image, file = Image.fromarray(picture), io.BytesIO()
    if max(image.size) > SIDE:
        image.thumbnail((SIDE, SIDE), Image.Resampling.BOX)  # each pixel is the mean of those that it stands for
    image.save(file, "PNG")
    return file.getvalue()
