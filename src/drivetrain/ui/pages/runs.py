"""The page of runs: the outcome of one or the best of several, their curves, and the commands to reproduce them."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain.config import catalog
from drivetrain.config.composed import flatten
from drivetrain.core.machine import files
from drivetrain.core.options.overrides import key_of
from drivetrain.core.options.selection import REPEATS, Figure
from drivetrain.core.typed import JsonObject, is_number
from drivetrain.core.user.given import objects_in
from drivetrain.run.identity import reads_environment
from drivetrain.run.reader import Points, RunFiles, differing, read
from drivetrain.run.result import Result
from drivetrain.ui import plots
from drivetrain.ui.pages import charts
from drivetrain.ui.pages.charts import ChartLine
from drivetrain.ui.pages.run_table import Target, best_name, common_target, costs, named, rank, table, verdict
from drivetrain.ui.sheet import (
    EMPTY,
    Drawn,
    PagePart,
    Section,
    Sheet,
    Table,
    commands,
    facts,
    figure,
    folded,
    joined,
    machine,
    remarks,
    sentence,
    setting,
    under,
    words,
)
from drivetrain.ui.terminal import duration, number

FILE = "report.html"  # in the run's directory
MOST_AT_END = 4 * files.MB  # bytes of a metrics.jsonl that is drawn at the end of a run: about a quarter of a second
OVER = ("updates", "samples", "seconds")  # horizontal axes of the curves
MAX_CURVES = 60  # runs with curves
MOST_NAMED = 5  # coloured ones among them: the best, the first and the worst
MOST_TABLES = 6  # runs with confusion matrices on the page; those of more runs are in their result.json
MOST_SETTINGS = 12  # settings that are drawn
MOST_NAMES = 8  # non-numeric values of a setting
OF_TRAINING: dict[str, tuple[str, float, bool]] = {  # figure of a record → title, factor, logarithmic axis
    "lr": ("Learning rate", 1.0, False),
    "grad_norm": ("Gradient norm, before clipping", 1.0, True),
    "samples_per_second": ("Speed, samples a second", 1.0, False),
    "data_wait": ("Waiting for data, % of the time", 100.0, False),
    "memory_bytes": ("Memory in use, GiB", 2.0**-30, False),
    "cpu_cores": ("Processor cores in use", 1.0, False),
    "gpu_busy": ("GPU busy, % of the time", 100.0, False),
    "noise_scale": ("Gradient noise scale, samples", 1.0, True),
}


def write(run_dir: Path, known: tuple[JsonObject, JsonObject] | None = None) -> Path | None:
    """Write the page at the run's end unless that would take long; return its path if it was written.

    `known` is as in `reader.read`.
    """
    with contextlib.suppress(OSError):  # a full disk loses the page, not the run
        records = run_dir / "metrics.jsonl"
        if not records.exists() or records.stat().st_size <= MOST_AT_END:
            return sheet_of([read(run_dir, known)]).write(run_dir / FILE)
    return None


def sheet_of(
    runs: Sequence[RunFiles],
    samples: Sequence[Section] = (),
    repeats: Table | None = None,
    target: Target = None,
    folder: Path = Path(),
) -> Sheet:
    """The sheet of one run, with sections for `samples`, or of several: the answer, their table, and the page's own sections.

    With a requested `target`, runs are sorted by their time to it. Links to the runs' pages are relative to `folder`.
    """
    best, names = sorted(range(len(runs)), key=lambda n: rank(runs[n]))[:MAX_CURVES], named(runs)
    shown = [(names[n], runs[n]) for n in sorted(best)]  # in their original order
    if len(runs) == 1:
        (run,) = runs
        title, first, body = f"{run.label} – drivetrain run", [], [*_came_of(run), *_curves(shown), *_took(run), *_classes(shown)]
        body += [*(samples or _no_samples(run)), *_changes(run), *_again(run)]
    else:
        title, first = "Runs compared – drivetrain report", _compared(runs, repeats, target, folder)
        body = under("The metric over each setting", PagePart(charts.grid(settings))) if (settings := _settings(runs)) else []
        again = [(name, f"drivetrain train {shlex.join(overrides_of(each))}".strip()) for name, each in shown]
        each_of = [part for name, line in again for part in (words(name), commands(line))]
        ranked = sorted(best, key=lambda n: rank(runs[n]))
        coloured = {names[n] for n in [min(ranked), ranked[-1], *ranked][:MOST_NAMED]} if len(ranked) > MOST_NAMED else {*names}
        body += [*_curves(shown, coloured), *_classes(shown)]
        body += under("How to reproduce them", folded("The command of each run", each_of, len(runs) < 8))
    body += under("Where it ran" if len(runs) == 1 else "Where they ran", *_environments(runs))
    came = verdict(runs, target)
    if repeats is not None and repeats.winner is not None:
        name, spread, count, *_ = map(str, repeats.rows[repeats.winner])
        metric, of = repeats.header[1].removesuffix(" ± deviation"), runs[0].evaluated.set
        came = f"Over {count} {repeats.header[2]} {name} has the mean {metric} {spread} on the {of} set at the end, " + (
            f"the best of {len(repeats.rows)} configs. {came}" if len(repeats.rows) > 1 else came
        )
    return Sheet(title, came, [*first, PagePart(joined(body))])


def _came_of(run: RunFiles) -> list[Section]:
    """A run's outcome: its place, remarks, and results."""
    began = float(run.environment.get("time") or 0)
    started = [time.strftime("started %Y-%m-%d %H:%M", time.localtime(began))] if 0 < began < 1e11 else []
    body: list[Section] = [remarks(" · ".join([*place_of(run), *started]))]
    if (result := run.result) is not None:
        body += [words(*(sentence(f"{remark[:1].upper()}{remark[1:]}") for remark in result.remarks))] if result.remarks else []
        body += under("What ended it", words(*result.error.splitlines())) if result.error else []
        body += _results(result, run)
    return body


def _took(run: RunFiles) -> list[Section]:
    return _speed(run.result) if run.result is not None else []


def _compared(runs: Sequence[RunFiles], repeats: Table | None, target: Target, folder: Path) -> list[Section]:
    """The table of several runs, their common settings, and the rows over seeds and folds."""
    ranked, of = target is not None, common_target(runs) if target is None else target
    found, same = table(runs, of, ranked).differing(always=3)
    said = [f"Curves are those of the best {MAX_CURVES}."] if len(runs) > MAX_CURVES else []
    if repeats is None:
        said.append("Each config ran with one seed. Several, as in runtime.seed=0,1,2, show whether a difference is chance.")
    said += [f"The same for all: {', '.join(f'{name} {cell}' for name, cell in same)}."] if same else []
    over = under(repeats.name, repeats) if repeats is not None else []
    return [_drawn(runs, found, of, ranked, folder), remarks(*said), *over]


def _classes(runs: Sequence[tuple[str, RunFiles]]) -> Iterator[Section]:
    """The tables of classes: open for one run, after a click for several."""
    for name, result in [(name, run.result) for name, run in runs if run.result and run.result.tables][:MOST_TABLES]:
        of_what, found = plots.of_result(result.tables)
        if len(runs) == 1:
            yield from charts.sections(found, of_what)
        else:
            yield folded(f"Classes of {name}", charts.sections(found, f"{name}, {of_what}", 3))


def _no_samples(run: RunFiles) -> list[Section]:
    return under(
        "Samples with predictions",
        words("This command adds the worst samples and some others, if the run kept its weights:"),
        commands(f"drivetrain report {shlex.quote(place_of(run)[0])}"),
    )


def _winner(runs: Sequence[RunFiles], target: Target, ranked: bool) -> int | None:
    """The number of the highlighted run: the first at the target, else the best by the common metric."""
    if ranked and target is not None:
        return 0 if runs[0].to_target(target) is not None else None
    best = min(range(len(runs)), key=lambda n: rank(runs[n]))
    return best if not rank(runs[best])[0] and len({r.metric for r in runs if r.metric}) == 1 else None


def _drawn(runs: Sequence[RunFiles], found: Table, target: Target, ranked: bool, folder: Path) -> Table:
    """The table, with the best run highlighted, bars of speed and memory, and links to the runs' pages."""
    of: dict[str, Callable[[RunFiles], float | None]] = {
        "samples/s": lambda r: r.result.samples_per_second if r.result else None,
        "peak memory": lambda r: r.result.peak_memory_bytes if r.result else None,
        "run time": lambda r: r.result.wall_s if r.result else None,
    }
    if target is not None:
        of |= {name: lambda r: (r.to_target(target) or (None,))[0] for name in found.header if name.startswith("time to ")}
    found_of = {name: [value(run) for run in runs] for name, value in of.items()}
    bars = {name: [v if v is not None and 0 < v < charts.LARGEST else None for v in each] for name, each in found_of.items()}
    winner = _winner(runs, target, ranked)
    files = [os.path.relpath(page, folder) if (page := run.path / FILE).exists() else "" for run in runs]
    rows = [[Drawn(str(name), file=file), *row] for file, (name, *row) in zip(files, found.rows, strict=True)]
    return replace(found, rows=rows, name="The runs", prose=("error", "folder"), sortable=True, winner=winner, bars=bars)


def _results(result: Result, run: RunFiles) -> list[Section]:
    """A row for each set and weights, with the metric that ranks models first."""
    ranks = (result.selection or {}).get("metric")
    found = {
        (of_set, when): figures
        for of_set in sorted(result.metrics, key=lambda of: of != "test")
        for when, figures in result.metrics[of_set].items()
        if figures
    }
    names = list(dict.fromkeys(name for figures in found.values() for name in figures if name != "update"))
    names.sort(key=lambda name: name != ranks)
    words = {
        "final": "at the end",
        "best": best_name(run),
        "averaged": "averaged weights",
        "baseline": "scikit-learn's HistGradientBoosting",
    }
    rows: list[list[str]] = []
    best = None
    for (of_set, when), figures in found.items():
        if when == "final" and found.get((of_set, "best"), {}).get("update") == result.updates:
            continue  # the last update is the best
        best = len(rows) if best is None and when == "best" and words["best"] == "best checkpoint" else best
        cells = [
            f"{number(figures[name])} {result.uncertainty(of_set, name, figures[name])}".rstrip()
            if is_number(figures.get(name))
            else "–"
            for name in names
        ]
        update = figures.get("update", result.updates if when == "final" else None)
        ended = ", at the end" if when == "best" and update == result.updates else ""
        rows.append([f"{of_set} set, {words.get(when, when)}{ended}", *cells, f"{update:,}" if isinstance(update, int) else "–"])
    if not rows:
        return []
    return under("Result", Table(["set and weights", *names, "update"], rows, "Result", winner=best))


def _speed(result: Result) -> list[Section]:
    """The speed, the time and the memory of the run."""
    rows = {
        "samples/s": figure(result.samples_per_second, "{:,.0f}"),
        **costs(result),
        "share of the peak speed (MFU)": f"{100 * result.mfu:.1f} % {result.mfu_note or ''}" if result.mfu is not None else "",
        "energy of the GPUs": figure(result.energy_joules, "{:,.0f} J"),
        "the whole run": duration(result.wall_s),
        "target": str(result.time_to_target or ""),
        "device": result.device_name or result.device or "",
        "processes": str(result.world_size) if result.world_size > 1 else "",
        "samples that could not be read": f"{result.skipped_samples:,}" if result.skipped_samples else "",
    }
    return under("What it took", facts([row for row in rows.items() if row[1] not in EMPTY], "Speed, memory and time"))


def _curves(runs: Sequence[tuple[str, RunFiles]], coloured: Collection[str] = ()) -> list[Section]:
    """Curves over the reader's choice of axis: loss and metric, and for one run all recorded figures.

    Among several runs the `coloured` ones are named above the charts; the others are faint.
    """
    runs = sorted(runs, key=lambda each: each[0] not in coloured)
    if not any(drawn := [chart for n, over in enumerate(OVER) for chart in _over(runs, over, f"over{n}", coloured)]):
        return []
    named = [(n, name) for n, (name, _) in enumerate(runs) if name in coloured]
    faint = f"; faint: {len(runs) - len(named)} others" if coloured and len(named) < len(runs) else ""
    buttons = "".join(
        f'<input type="radio" name="over" id="over{n}" value="{n}"{" checked" if not n else ""}>'
        f'<label for="over{n}">{name}</label>'
        for n, name in enumerate(OVER)
    )
    title = "How it went" if len(runs) == 1 else "How they went"
    key = charts.key(named) if len(runs) > 1 else ""
    return under(title, PagePart(f'<div class="over">Over {buttons}{faint}{key}{charts.grid(drawn)}</div>'))


def _over(runs: Sequence[tuple[str, RunFiles]], over: str, kind: str, coloured: Collection[str]) -> Iterator[str]:
    alone = len(runs) == 1
    losses = [
        ChartLine("training" if alone else name, points(run.train, over, "loss"), not alone and name not in coloured)
        for name, run in runs
    ]
    losses += _judged(runs, "loss", over, coloured) if alone else []
    log = charts.spans_decades([y for curve in losses for _, y in curve.points])
    title = ("Loss" if alone else "Training loss") + (" (logarithmic axis)" if log else "")
    yield charts.curves(title, losses, over, log, kind=kind, keyed=alone)
    for metric, of_set in [(run.selection.name, run.evaluated.set) for _, run in runs if run.selection][:1]:
        if not alone or Figure.parse(metric)[:2] != Figure("loss")[:2]:
            named = f"{Figure.parse(metric).of_weights.replace('_', ' ').capitalize()}, {of_set} set"
            yield charts.curves(named, _judged(runs, metric, over, coloured), over, kind=kind, keyed=alone)
    for name, (title, factor, log) in OF_TRAINING.items() if alone else ():
        shown = [(x, y * factor) for x, y in points(runs[0][1].train, over, name)]
        if name == "samples_per_second":
            shown = shown[1:] or shown  # the first one includes the start
        yield charts.curves(title, [ChartLine("training", shown)], over, log, kind=kind, zero=True)


def _judged(runs: Sequence[tuple[str, RunFiles]], metric: str, over: str, coloured: Collection[str]) -> list[ChartLine]:
    """A curve of a figure for each run; a single run has a curve for each evaluated set."""
    if len(runs) > 1:
        of = {name: run.selection.name if run.selection else metric for name, run in runs}
        return [ChartLine(name, points(run.evaluated, over, of[name]), name not in coloured) for name, run in runs]
    ((_, run),) = runs
    known = dict.fromkeys(name for values in run.evaluated.values for name in values)
    sets = Figure.parse(metric).on_all_sets(known)
    return [ChartLine(f"{run.evaluated.set} set {of}".rstrip(), points(run.evaluated, over, name)) for of, name in sets.items()]


def points(found: Points, over: str, name: str) -> list[tuple[float, float]]:
    """The numeric values of a figure over updates or seconds."""
    return [(x, y) for x, y in zip(getattr(found, over), found.curve(name), strict=True) if y is not None]


def _settings(runs: Sequence[RunFiles]) -> list[str]:
    """The best value of the metric over each differing setting, with the mean for each of its values."""
    metric = next((each.metric[0] for each in runs if each.metric), None)
    found = []
    given = {key_of(word) for run in runs for word in overrides_of(run)}.difference(REPEATS)
    keys = [key for key in differing(runs) if key not in REPEATS]
    for key in ([key for key in keys if key in given] or keys)[:MOST_SETTINGS] if metric is not None else ():
        points = [(each.config.get(key), best) for each in runs if (best := each.best()) is not None and math.isfinite(best)]
        numbers = [(float(x), y) for x, y in points if x is not None and is_number(x)]
        names = sorted({setting(x) for x, _ in points}) if len(numbers) < len(points) else []
        if len(names) > MOST_NAMES:
            continue
        dots = [(float(names.index(setting(x))), y) for x, y in points] if names else numbers
        log = not names and charts.spans_decades([x for x, _ in dots])
        means = [(x, statistics.mean(y for each, y in dots if each == x)) for x in sorted({x for x, _ in dots})]
        title = f"Best {metric} over {key}" + (" (logarithmic axis)" if log else "")
        curves = [ChartLine("runs", sorted(dots)), *([ChartLine("their mean", means)] if len(means) < len(dots) else [])]
        found.append(charts.curves(title, curves, key, log_x=log, dots=1, names=names))
    return found


def _changes(run: RunFiles) -> list[Section]:
    """The run's settings that differ from the default recipe."""
    rows = [(key, setting(value, "null"), setting(_default(run.config, key), "null")) for key, value in run.changed.items()]
    found = Table(("key", "this run", "default"), rows, "Keys that the run set", ("this run", "default"))
    nothing = words("Nothing." if run.config else "Its recipe.yaml cannot be read.")
    return under("What differs from the default recipe", found if rows else nothing)


def _default(config: dict[str, Any], key: str) -> Any:
    """A key's default in drivetrain's option files, as written there; "–" without one."""
    group, _, name = key.partition(".")
    if not name:
        return {**catalog.root_config(), **catalog.default_options()}.get(key, "–")
    option = catalog.option_files().get(group, {}).get(str(config.get(group)))
    return flatten(dict(catalog.content(option))).get(name, "–") if option else "–"


def place_of(run: RunFiles) -> tuple[str, ...]:
    """The run's folder for use in commands, and a remark.

    The folder is called RUN if its path comes from the environment: such values may be secrets and are never written.
    """
    local = run.environment.get("machine_local")
    words = [str(local.get("output_dir"))] if isinstance(local, dict) else []
    words += [word for word in overrides_of(run) if key_of(word).startswith(("output_dir", "hydra."))]
    return ("RUN", "the folder that this page is in") if any(map(reads_environment, words)) else (str(run.path),)


def overrides_of(run: RunFiles) -> list[str]:
    """The run's overrides."""
    found = run.result.overrides if run.result else run.environment.get("overrides", [])
    return [str(word) for word in found]


def _again(run: RunFiles) -> list[Section]:
    """The commands to repeat, resume and use the run."""
    place, given = shlex.quote(place_of(run)[0]), overrides_of(run)
    local = run.environment.get("machine_local")
    own = [word for word in given if isinstance(local, dict) and key_of(word) in local and key_of(word) != "output_dir"]
    if objects := objects_in(given):
        only = f"Only its own program can: {' '.join(objects)} are that program's objects (drivetrain.train)."
        return under("How to reproduce it", words(only))
    recipe = shlex.join([f"recipe={place_of(run)[0]}/recipe.yaml", *own])
    body = [words("The same command again:"), commands(shlex.join(["drivetrain", "train", *given]))]
    if run.config:
        body += [words("Every setting of that time, even if defaults have changed since:")]
        body.append(commands(f"drivetrain train {recipe}"))
    body += [
        words("To resume it from its end, evaluate it again, or use it:"),
        commands(f"drivetrain train resume={place}", f"drivetrain evaluate {place}", f"drivetrain predict {place} FILE"),
    ]
    return under("How to reproduce it", *body)


def _environments(runs: Sequence[RunFiles]) -> list[Section]:
    """Each machine once, with the runs on it."""
    found: dict[str, tuple[Section, list[str]]] = {}
    for name, run in zip(named(runs), runs, strict=True):
        known = machine(run.environment)
        about = known if known.rows else words("No record of the machine.")
        found.setdefault(about.html, (about, []))[1].append(name)
    if len(found) == 1:
        return [about for about, _ in found.values()]
    return [
        part for about, of in found.values()
        for part in (words(f"{'; '.join(of[:20])}{' …' if len(of) > 20 else ''}:"), about)
    ]  # fmt: skip
