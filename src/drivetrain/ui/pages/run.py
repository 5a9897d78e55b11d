"""The page of one run: what came of it, how it went, and how to make it again."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.config import catalog
from drivetrain.config.composed import flatten
from drivetrain.core.machine import files
from drivetrain.core.options.overrides import key_of
from drivetrain.core.options.selection import Figure
from drivetrain.core.typed import JsonObject, is_number
from drivetrain.run.identity import reads_environment
from drivetrain.run.reader import Points, RunFiles, read
from drivetrain.run.result import Result
from drivetrain.ui import plots
from drivetrain.ui.pages import charts
from drivetrain.ui.pages.charts import ChartLine
from drivetrain.ui.sheet import (
    PagePart,
    Section,
    Sheet,
    Table,
    commands,
    facts,
    machine,
    remarks,
    sentence,
    setting,
    under,
    words,
)
from drivetrain.ui.terminal import duration, number

FILE = "report.html"  # in the run's directory
MOST_AT_END = 4 * files.MB  # bytes of a metrics.jsonl that the end of a run draws: about a quarter of a second
OVER = ("updates", "seconds")  # what curves can be drawn over
OF_TRAINING: dict[str, tuple[str, float, bool]] = {  # figure of a record → title, factor, whether its axis is logarithmic
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
    """Write the page at the run's end, where its records are few enough to cost no time; return its path if it was written.

    `known` is as in `reader.read`.
    """
    with contextlib.suppress(OSError):  # a full disk loses the page, not the run
        records = run_dir / "metrics.jsonl"
        if not records.exists() or records.stat().st_size <= MOST_AT_END:
            return sheet_of(read(run_dir, known)).write(run_dir / FILE)
    return None


def sheet_of(run: RunFiles, samples: Sequence[Section] = ()) -> Sheet:
    """The sheet of a run, from its files; `samples` are sections that show some."""
    began = float(run.environment.get("time") or 0)
    started = [time.strftime("started %Y-%m-%d %H:%M", time.localtime(began))] if 0 < began < 1e11 else []
    body: list[Section] = [remarks(" · ".join([*place_of(run), *started]))]
    result = run.result
    if result is not None:
        body += [words(*(sentence(f"{remark[:1].upper()}{remark[1:]}") for remark in result.remarks))] if result.remarks else []
        body += under("What ended it", words(*result.error.splitlines())) if result.error else []
        body += [*_results(result, run), *_speed(result)]
    body += _curves(run)
    if result is not None and result.tables:
        of_what, found = plots.of_result(result.tables)
        body += charts.sections(found, of_what)
    body += samples or under(
        "Samples with predictions",
        words("This command adds the worst samples and some others, where the run has kept its weights:"),
        commands(f"drivetrain report {shlex.quote(place_of(run)[0])}"),
    )
    body += [*_changes(run), *_again(run), *under("Where it ran", environment(run))]
    return Sheet(f"{run.label} – drivetrain run", verdict(run), body)


def verdict(run: RunFiles) -> str:
    """The sentence on what was trained, how long, with which result, and how it ended."""
    what = " on ".join(str(run.config[key]) for key in ("model", "data") if key in run.config) or "This run"
    if run.config.get("model") == "timm" and "model.name" in run.config:
        what = what.replace("timm", str(run.config["model.name"]), 1)
    result, updates = run.result, run.train.updates[-1] if run.train.updates else 0
    figures = _figures(run)
    if result is None:
        latest = f", with {figures}" if figures else ""
        ended = {"running": f"is still training, and at update {updates:,}", "killed": f"was killed after update {updates:,}"}
        return f"{what} {ended.get(run.status, f'left a result.json that cannot be read, after update {updates:,}')}{latest}"
    epochs = f"{result.passes} ({result.updates:,} update{'s' * (result.updates != 1)})"
    took = f"{duration(result.wall_s)} with the start"
    length = f"{epochs} in {took}"
    if result.resumed_at:
        length = epochs if result.trained_nothing else f"{epochs}, of which those since {result.resumed_at:,} took {took}"
    on = f" on {result.world_size} × {result.device}" if result.device and result.world_size > 1 else ""
    if run.status == "completed":
        early = f"the run stopped early: {result.stopped}" if result.stopped else "the run completed"
        return f"{what} reached {figures or 'no figures'} after {length}{on}; {early}"
    reason = f": {result.error.splitlines()[0]}" if result.error else ""
    how = {"diverged": "diverged", "interrupted": "was interrupted", "failed": "failed"}.get(run.status, f"ended as {run.status}")
    return f"{what} {how} after {length}{on}" + (f", with {figures}" if figures else "") + reason


def _figures(run: RunFiles) -> str:
    """The metric that ranks the run's models, on each set: of the best checkpoint where the run kept it, else at the end."""
    name = run.metric[0] if run.metric else ((run.result.selection or {}).get("metric", "") if run.result else "")
    if run.result is None:
        value = run.best()
        return f"{name} {number(value)} at best on the {run.evaluated.set} set" if value is not None else ""
    found, figure = [], Figure.parse(name)
    for of_set, evaluations in sorted(run.result.metrics.items(), key=lambda item: item[0] != "test"):
        known = {of: each for when in ("final", "best") for of, each in figure.on_all_sets(evaluations.get(when, ())).items()}
        for of, each in known.items():
            when = next((when for when in ("best", "final") if is_number(evaluations.get(when, {}).get(each))), None)
            if when is not None:
                value = evaluations[when][each]
                words = number(value), run.result.uncertainty(of_set, each, value), f"on the {of_set} set", of
                found.append((" ".join(filter(None, words)), when))
    which = f" ({_best(run)})" if {when for _, when in found} == {"best"} else ""
    return f"{figure.of_weights} {' and '.join(said for said, _ in found)}{which}" if found else ""


def _best(run: RunFiles) -> str:
    """The name of the best evaluation: a checkpoint only where it was kept."""
    best = run.result.judged("best").get("update") if run.result is not None else None
    kept = run.config.get("saving") == "best" or (run.result is not None and best == run.result.updates)
    return "best checkpoint" if kept else "best evaluation"


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
    words = {"final": "at the end", "best": _best(run), "averaged": "averaged weights"}
    rows: list[list[str]] = []
    best = None
    for (of_set, when), figures in found.items():
        if when == "final" and found.get((of_set, "best"), {}).get("update") == result.updates:
            continue  # it is the best
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
    form: list[tuple[str, Any, Callable[[Any], str]]] = [
        ("samples a second", result.samples_per_second, number),
        ("an update, median", result.step_ms_p50, "{:.2f} ms".format),
        ("an update, 95th percentile", result.step_ms_p95, "{:.2f} ms".format),
        ("waiting for data", result.data_wait_fraction, lambda share: f"{100 * share:.1f} % of the time"),
        ("share of the peak speed (MFU)", result.mfu, lambda share: f"{100 * share:.1f} % {result.mfu_note or ''}"),
        ("peak memory", result.peak_memory_bytes, lambda count: f"{count / 2**30:.2f} GiB"),
        ("compiling", result.compile_s, "{:.1f} s".format),
        ("energy of the GPUs", result.energy_joules, "{:,.0f} J".format),
        ("the whole run", result.wall_s, duration),
        ("target", result.time_to_target or None, str),
        ("device", result.device_name or result.device, str),
        ("processes", result.world_size if result.world_size > 1 else None, str),
        ("samples that could not be read", result.skipped_samples or None, "{:,}".format),
    ]
    rows = [(name, said(value)) for name, value, said in form if value is not None]
    return under("What it took", facts(rows, "Speed, memory and time")) if rows else []


def _curves(run: RunFiles) -> list[Section]:
    """The curves, over updates and over seconds; the reader chooses."""
    return switched("How it went", OVER, [chart for n, over in enumerate(OVER) for chart in _over(run, over, f"over{n}")])


def switched(title: str, over: Sequence[str], drawn: Sequence[str]) -> list[Section]:
    """Charts of which the reader chooses over what they are drawn: those of class over0, over1, …"""
    if not any(drawn):
        return []
    buttons = "".join(
        f'<input type="radio" name="over" id="over{n}" value="{n}"{" checked" if not n else ""}>'
        f'<label for="over{n}">{name}</label>'
        for n, name in enumerate(over)
    )
    return under(title, PagePart(f'<div class="over">Over {buttons}{charts.grid(drawn)}</div>'))


def _over(run: RunFiles, over: str, kind: str) -> Iterator[str]:
    evaluated, metric = f"{run.evaluated.set} set", run.metric[0] if run.metric else None
    losses = [ChartLine("training", points(run.train, over, "loss")), *_on_sets(run, "loss", over)]
    log = charts.spans_decades([y for curve in losses for _, y in curve.points])
    yield charts.curves("Loss" + (" (logarithmic axis)" if log else ""), losses, over, log, kind=kind)
    if metric and Figure.parse(metric)[:2] != Figure("loss")[:2]:
        named = f"{Figure.parse(metric).of_weights.replace('_', ' ').capitalize()}, {evaluated}"
        yield charts.curves(named, _on_sets(run, metric, over), over, kind=kind)
    for name, (title, factor, log) in OF_TRAINING.items():
        shown = [(x, y * factor) for x, y in points(run.train, over, name)]
        if name == "samples_per_second":
            shown = shown[1:] or shown  # the first one includes the start
        yield charts.curves(title, [ChartLine("training", shown)], over, log, kind=kind, zero=True)


def _on_sets(run: RunFiles, metric: str, over: str) -> list[ChartLine]:
    """A curve of a figure for each set that the run selects by."""
    known = dict.fromkeys(name for values in run.evaluated.values for name in values)
    found = Figure.parse(metric).on_all_sets(known)
    whole = f"{run.evaluated.set} set"
    return [ChartLine(f"{whole} {of}".rstrip(), points(run.evaluated, over, name)) for of, name in found.items()]


def points(found: Points, over: str, name: str) -> list[tuple[float, float]]:
    """The values of a figure over updates or seconds, where it has a number."""
    return [(x, y) for x, y in zip(getattr(found, over), found.curve(name), strict=True) if y is not None]


def _changes(run: RunFiles) -> list[Section]:
    """The settings that the run chose otherwise than the default recipe."""
    defaults = _Defaults(run.config)
    rows = [(key, setting(value, "null"), setting(defaults.of(key), "null")) for key, value in run.changed.items()]
    found = Table(("key", "this run", "default"), rows, "Keys that the run set", ("this run", "default"))
    nothing = words("Nothing." if run.config else "Its recipe.yaml cannot be read.")
    return under("What differs from the default recipe", found if rows else nothing)


class _Defaults:
    """The values that drivetrain's own files of options give, as they are written there."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config, self._read = config, {"": dict(catalog.root_config())}

    def of(self, key: str) -> Any:
        """The default of a key; "–" where these files do not say it."""
        for line in self._read[""].get("defaults", []):
            if isinstance(line, dict) and key in line:
                return line[key]
        group, _, name = key.partition(".")
        if name and group not in self._read:
            option = str(self._config.get(group))
            known = catalog.option_files().get(group, {})
            self._read[group] = dict(catalog.content(known[option])) if option in known else {}
        return flatten(self._read[group if name else ""]).get(name or key, "–")


def place_of(run: RunFiles) -> tuple[str, ...]:
    """The run's folder, as commands name it, and a remark.

    It is called RUN where its path comes from the environment, whose values are written nowhere: they may be secrets.
    """
    local = run.environment.get("machine_local")
    words = [str(local.get("output_dir"))] if isinstance(local, dict) else []
    words += [word for word in overrides_of(run) if key_of(word).startswith(("output_dir", "hydra."))]
    return ("RUN", "the folder that this page is in") if any(map(reads_environment, words)) else (str(run.path),)


def overrides_of(run: RunFiles) -> list[str]:
    """The overrides that the run was started with."""
    found = run.result.overrides if run.result else run.environment.get("overrides", [])
    return [str(word) for word in found]


def _again(run: RunFiles) -> list[Section]:
    """The commands that make the run again, go on with it, and use it."""
    place, given = shlex.quote(place_of(run)[0]), overrides_of(run)
    local = run.environment.get("machine_local")
    own = [word for word in given if isinstance(local, dict) and key_of(word) in local and key_of(word) != "output_dir"]
    recipe = shlex.join([f"recipe={place_of(run)[0]}/recipe.yaml", *own])
    body = [words("The same command again:"), commands(shlex.join(["drivetrain", "train", *given]))]
    if run.config:
        body += [words("Every setting as it was then, also where defaults have changed since:")]
        body.append(commands(f"drivetrain train {recipe}"))
    body += [
        words("To go on with it where it ended, evaluate it again, or use it:"),
        commands(f"drivetrain train resume={place}", f"drivetrain evaluate {place}", f"drivetrain predict {place} FILE"),
    ]
    return under("How to reproduce it", *body)


def environment(run: RunFiles) -> Section:
    """The machine that a run ran on."""
    found = machine(run.environment)
    return found if found.rows else words("It left no record of that.")
