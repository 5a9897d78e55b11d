"""The samples of a run's page: the worst ones and others, drawn with the model's answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import DataError, UserError
from drivetrain.core.lazy import numpy as np
from drivetrain.core.typed import JsonObject
from drivetrain.data.base import Data
from drivetrain.run.reader import RunFiles
from drivetrain.ui import plots, sheet
from drivetrain.ui.pages import charts
from drivetrain.ui.terminal import number

if TYPE_CHECKING:
    from drivetrain.inference import inputs
    from drivetrain.inference.loaded import LoadedRun
    from drivetrain.inference.predictions import Predictions


CHARACTERS = 400  # of a text
OF_SET = "test"
MOST_NUMBERS = 4  # of a target, that are drawn
MOST_COLUMNS = 20  # of a table, whose values are shown
MOST_CLASSES = 8  # whose curves are drawn
BINS = 10  # of probabilities
IGNORED = -100  # a target that no loss counts


@dataclass
class ShownSample:
    """A sample, its target, and the model's answer."""

    name: str
    x: Any
    target: str
    prediction: str
    right: bool | None  # None: a matter of degree
    loss: float  # by which the worst are found
    pairs: Sequence[tuple[float, float]] = ()  # each true number or class, and what was predicted
    shares: Sequence[float] = ()  # the probability of each class or label
    truth: Sequence[float] = ()  # 1 for each that it is


def samples_of(run: RunFiles, count: int, most: int) -> list[sheet.Section]:
    """The sections on a run's samples: `count` of the worst of `most` at random, as many others, and how predictions lie.

    Where there are none, it says why.
    """
    title = "Samples with predictions"
    try:
        loaded, samples, total = _samples(run.path, most)
        return (
            _drawn(title, run, loaded, samples, total, count)
            if samples
            else sheet.under(title, sheet.words("There are none: no sample."))
        )
    except (UserError, DataError) as error:
        return sheet.under(title, sheet.words(f"There are none: {error}"))
    except Exception as error:  # the run's own code, or its data, may fail in any way: the page has more to show
        said = next(iter(str(error).splitlines()), "")
        return sheet.under(title, sheet.words(f"There are none: {type(error).__name__}: {said}"))


def _drawn(
    title: str, run: RunFiles, loaded: LoadedRun, samples: Sequence[ShownSample], total: int, count: int
) -> list[sheet.Section]:
    """The samples as sections, for their kind."""
    worst = sorted(samples, key=lambda sample: -sample.loss)[:count]
    looked_at = f"{len(samples):,}{f' at random of {total:,}' if len(samples) < total else ''} of the {OF_SET} set"
    measured = sheet.remarks(f"The worst are those with the largest loss, of {looked_at}.")
    shown = sheet.under(title, measured, *sheet.under("The worst", _shown(worst, loaded), level=3))
    if others := [sample for sample in samples if not any(sample is each for each in worst)][:count]:
        shown += sheet.under("Others at random", _shown(others, loaded), level=3)  # they came in random order
    named = [str(v) for key, v in run.config.items() if key.startswith("metrics.") and key.endswith("positive") and v is not None]
    of = [name for name in loaded.classes if name in named] or loaded.classes[len(loaded.classes) == 2 :]
    shown += _ranked(samples, loaded, of, looked_at) if samples[0].shares else []
    counted = plots.of_result(run.result.tables)[1] if run.result is not None else {}
    if loaded.kind == "class" and not any(map(plots.is_confusion, counted.values())):
        return [*shown, *charts.sections({"confusion_matrix": _confusion(samples, loaded.classes)}, looked_at)]
    return [*shown, *_scatter(samples, looked_at)] if loaded.kind == "values" else shown


def _confusion(samples: Sequence[ShownSample], names: Sequence[str]) -> JsonObject:
    """The counts of classes by predicted class, as metrics=confusion_matrix makes them."""
    counts = Counter(pair for sample in samples for pair in sample.pairs)
    return {"rows": names, "columns": names, "values": [[counts[n, m] for m in range(len(names))] for n in range(len(names))]}


def _ranked(samples: Sequence[ShownSample], loaded: LoadedRun, of: Sequence[str], looked_at: str) -> list[sheet.Section]:
    """How well probabilities separate each class from the others, and their calibration."""
    shares, truth = np.array([sample.shares for sample in samples]), np.array([sample.truth for sample in samples]) > 0.5
    told_apart, found, line = list[charts.ChartLine](), list[charts.ChartLine](), [(0.0, 0.0), (1.0, 1.0)]
    for n in [n for n in map(loaded.classes.index, of) if 0 < truth[:, n].sum() < len(samples)][:MOST_CLASSES]:
        order = np.argsort(-shares[:, n], kind="stable")
        ends = np.flatnonzero(np.diff(shares[order, n], append=-1.0))  # of equal probabilities the last
        hits, misses = np.cumsum(truth[order, n])[ends], np.cumsum(~truth[order, n])[ends]
        x, recall = np.append(0, misses / misses[-1]), np.append(0, hits / hits[-1])
        area = float((np.diff(x) * (recall[1:] + recall[:-1]) / 2).sum())
        told_apart.append(charts.ChartLine(f"{loaded.classes[n]} (area {area:.3f})", list(zip(x, recall, strict=True))))
        found.append(charts.ChartLine(loaded.classes[n], list(zip(recall[1:], hits / (hits + misses), strict=True))))
    if loaded.kind == "class":
        best = np.arange(len(shares)), shares.argmax(1)
        shares, truth = shares[best], truth[best]
    sure, right = shares.ravel(), truth.ravel()
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    kept = [(float(sure[bins == n].mean()), float(right[bins == n].mean())) for n in range(BINS) if (bins == n).any()]
    calibration = [charts.ChartLine("the model", kept), charts.ChartLine("as it says", line)]
    drawn = [
        charts.curves(
            "ROC: found against false alarms",
            [*told_apart, charts.ChartLine("by chance", line)],
            "share of the others taken for it",
        ),
        charts.curves("Precision against recall", found, "recall"),
        charts.curves("Calibration: how often it is right", calibration, "probability that it gives"),
    ]
    return sheet.under(f"Probabilities, {looked_at}", sheet.PagePart(charts.grid(drawn)))


def _scatter(samples: Sequence[ShownSample], looked_at: str) -> list[sheet.Section]:
    """Numbers that were predicted against the true ones, and how far they are off."""
    drawn = []
    for n in range(min(MOST_NUMBERS, len(samples[0].pairs))):
        true, number = zip(*(sample.pairs[n] for sample in samples), strict=True)
        of = f", number {n + 1} of {len(samples[0].pairs)}" if len(samples[0].pairs) > 1 else ""
        ends = [(end, end) for end in (min(true), max(true))]
        residuals = [(y, y - x) for x, y in zip(true, number, strict=True)]
        zero = [(end, 0.0) for end in (min(number), max(number))]
        dots = [charts.ChartLine("samples", list(zip(true, number, strict=True))), charts.ChartLine("as they are", ends)]
        drawn += [
            charts.curves(f"Predicted against true{of}", dots, "true", dots=1),
            charts.curves(
                f"Residuals: predicted less true{of}",
                [charts.ChartLine("samples", residuals), charts.ChartLine("none", zero)],
                "predicted",
                dots=1,
            ),
        ]
    return sheet.under(f"Predictions, {looked_at}", sheet.PagePart(charts.grid(drawn)))


def _samples(run_dir: Path, most: int) -> tuple[LoadedRun, list[ShownSample], int]:
    """The run, samples of the set with their predictions in random order, and how many the set has."""
    from drivetrain.inference.inputs import grouped, read_in_batches
    from drivetrain.inference.loaded import load

    loaded = load(run_dir)
    blocks, total = loaded.blocks_of(OF_SET, 1)
    chosen = set(random.Random(0).sample(range(total), min(total, most)))
    picked = (block for n, block in enumerate(blocks) if n in chosen)
    found: list[ShownSample] = []
    for batch in read_in_batches(picked, min(64, loaded.batch_size())):
        for samples, x in grouped(batch):
            found += _judged(samples, loaded.predict_ready(loaded.transforms(x)), loaded)
    random.Random(0).shuffle(found)
    return loaded, found, total


def _judged(reads: Sequence[inputs.PredictedSample], predicted: Predictions, loaded: LoadedRun) -> Iterator[ShownSample]:
    """The samples of a batch with their losses."""
    import torch

    for n, one in enumerate(reads):
        if one.target is None:
            continue
        output, target = predicted.output[n].float().cpu(), torch.tensor(one.target)
        if loaded.kind == "class":
            shares = output.softmax(-1)
            best = int(shares.argmax())
            loss, right = -float(shares[int(target)].clamp_min(1e-30).log()), best == int(target)
            said = f"{loaded.classes[best]} ({float(shares[best]):.0%})"
            truth = [float(number == int(target)) for number in range(len(shares))]
            pairs = [(int(target), best)]
            yield ShownSample(one.name, one.x, loaded.classes[int(target)], said, right, loss, pairs, shares.tolist(), truth)
        elif loaded.kind == "labels":
            shares = output.sigmoid().clamp(1e-6, 1 - 1e-6)
            loss = float(torch.nn.functional.binary_cross_entropy(shares, target.float()))
            said = ", ".join(name for name, on in zip(loaded.classes, (shares > 0.5).tolist(), strict=True) if on) or "none"
            right = bool(((shares > 0.5) == (target > 0.5)).all())
            is_ = str(loaded.name_target(one.target)) or "none"
            yield ShownSample(one.name, one.x, is_, said, right, loss, (), shares.tolist(), target.tolist())
        elif loaded.kind == "values":
            wide = float((output.flatten()[: target.numel()] - target.float().flatten()).abs().mean())
            found = torch.as_tensor(predicted.labels)[n].flatten().tolist()
            true = loaded.in_units(target).flatten().tolist()
            is_, said = (", ".join(map(number, values)) for values in (true, found))
            yield ShownSample(one.name, one.x, is_, said, None, wide, list(zip(true, found, strict=False)))
        elif loaded.kind == "mask":
            counted = target != IGNORED
            share = float((output.argmax(0) == target)[counted].float().mean()) if counted.any() else 1.0
            yield ShownSample(one.name, (one.x, output.argmax(0)), "", f"{share:.1%} of the pixels right", None, 1 - share)
        elif loaded.kind == "tokens":
            counted = target != IGNORED  # each token is predicted from those before it
            losses = torch.nn.functional.cross_entropy(output, target.long(), ignore_index=IGNORED, reduction="none")[counted]
            right_ones = (output.argmax(-1) == target)[counted].float()
            said = f"{float(right_ones.mean()):.0%} of the tokens right" if len(losses) else "–"
            yield ShownSample(one.name, one.x, "", said, None, float(losses.mean()) if len(losses) else 0.0)


def _shown(samples: Sequence[ShownSample], loaded: LoadedRun) -> sheet.Section:
    """Samples of this run: as pictures, texts, or names alone."""
    shape, tokens = loaded.transforms.shape, loaded.transforms.tokens
    if not tokens and shape is not None and len(shape) == 3 and shape[0] in (1, 3):
        return charts.tiles([_tile(sample, loaded.transforms.option.max_value) for sample in samples])
    target = ["is"] if any(sample.target for sample in samples) else []
    values = [{} if tokens else Data.of(loaded.run).describe_row(sample.x, loaded.data) for sample in samples]
    names = list(values[0])[:MOST_COLUMNS]
    rows = []
    for sample, of in zip(samples, values, strict=True):
        shown = str((loaded.text_of(sample.x) if tokens else None) or sample.name)
        shown = shown if len(shown) <= CHARACTERS else f"{shown[:CHARACTERS]} …"
        is_ = [sample.target] if target else []
        rows.append([shown, *is_, sample.prediction, f"{sample.loss:.4g}", *(of[name] for name in names)])
    columns = ["text" if tokens else "sample", *target, "predicted", "loss", *names]
    return sheet.Table(columns, rows, "Samples with predictions", ("is", "predicted") if tokens else ())


def _tile(sample: ShownSample, top: float | None) -> str:
    from drivetrain.logger import drawing

    x, mask = sample.x if isinstance(sample.x, tuple) else (sample.x, None)
    picture = drawing.pixels(x.cpu().numpy(), top)
    if mask is not None:
        picture = drawing.with_mask(picture, mask.numpy())
    kind = "" if sample.right is None else "right" if sample.right else "wrong"
    return charts.tile(picture, sample.name, sample.target, sample.prediction, kind)
