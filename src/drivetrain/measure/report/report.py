"""`drivetrain report DIR…`: any runs and sweeps as one table, one CSV file and one page."""

from __future__ import annotations

import math
import os
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import DONE, UserError, refuse
from drivetrain.core.machine.paths import expanded
from drivetrain.core.options.option import CountOrZero
from drivetrain.core.options.overrides import key_of
from drivetrain.core.options.selection import Reach, Selection
from drivetrain.core.typed import fits, is_number
from drivetrain.measure import verbs
from drivetrain.measure.benchmark import quality
from drivetrain.measure.benchmark.variants import TimesToTarget, trained_run
from drivetrain.measure.intervals import deviation
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, differing, find, put_on_one_clock, read
from drivetrain.run.result import Result
from drivetrain.ui import plots
from drivetrain.ui.output import echo
from drivetrain.ui.pages import charts
from drivetrain.ui.pages import run as run_page
from drivetrain.ui.pages.charts import ChartLine
from drivetrain.ui.sheet import (
    Drawn,
    PagePart,
    Section,
    Sheet,
    Table,
    commands,
    figure,
    folded,
    joined,
    remarks,
    sentence,
    setting,
    under,
    words,
)

if TYPE_CHECKING:
    pass
from drivetrain.measure.report.samples import samples_of

WIDTH = 100  # characters of a table where there is no terminal
ENDED = ("completed", "failed", "diverged")  # the statuses of runs that ended by themselves
Target = float | Reach | None  # a number is of the runs' own metric


def summarize_seeds(runs: Sequence[RunFiles], target: Target = None) -> Table:
    """A row for each config that was run with several seeds: its metric's mean and deviation, and the verdict on its quality.

    The verdict is against the first such config on the same data and loss, the oldest, seed by seed. Runs that were stopped
    are left out. With a `target` each row says how many seeds reached it, and the fastest comes first.
    """
    groups: dict[str, dict[int, RunFiles]] = {}
    for run in runs:
        seed = run.config.get("runtime.seed", 0)
        if run.config and run.status in ENDED and fits(seed, int):
            key = str(sorted((k, str(v)) for k, v in run.config.items() if k != "runtime.seed"))
            group = groups.setdefault(key, {})
            if run.status == "completed" or seed not in group:
                group[seed] = run
    configs = [by_seed for by_seed in groups.values() if len(by_seed) > 1]
    metrics = {run.metric[0] for by_seed in configs for run in by_seed.values() if run.metric}
    of = metrics.pop() if len(metrics) == 1 else ""
    names = named([next(iter(by_seed.values())) for by_seed in configs], {"runtime.seed"})
    rows = [[name, *_spread(by_seed, of), "", ""] for name, by_seed in zip(names, configs, strict=True)]
    for row, by_seed in zip(rows[1:], configs[1:], strict=True):
        first = next(other for other in configs if _task(other) == _task(by_seed))
        seeds = sorted(by_seed.keys() & first.keys())
        if first is not by_seed and len(seeds) > 1 and (metric := first[seeds[0]].metric) is not None:
            ours, theirs = ([trained_run(side[seed], seed) for seed in seeds] for side in (by_seed, first))
            found = quality.verdict(ours, theirs, Selection(metric[0], max if metric[1] else min))
            row[3:] = found.outcome, found.reason
    header = ["config", f"{of or 'mean'} ± deviation", "seeds", "against the first", "because"]
    if target is not None:
        reached = [[run.to_target(target) or (None, None) for run in by_seed.values()] for by_seed in configs]
        times = [TimesToTarget("", [s for s, _ in each], [updates for _, updates in each]) for each in reached]
        for row, each in zip(rows, times, strict=True):
            when = f", after {each.when} (median)" if math.isfinite(each.median) else ""
            row.append(f"{each.reached} of {len(each.seconds)} seeds{when}")
        rows = [row for _, row in sorted(zip(times, rows, strict=True), key=lambda found: found[0].rank)]
        header.append(f"{_said(target)} reached by")
    return Table(header, rows, "Over seeds", ("because",), spare=("because",), width=WIDTH, sortable=True).used(3)


def _said(target: Target) -> str:
    return "target" if target is None else str(target) if isinstance(target, Reach) else f"{target:.4g}"


def _task(by_seed: dict[int, RunFiles]) -> str:
    """The runs' data and loss."""
    config = next(iter(by_seed.values())).config
    return str(sorted((k, str(v)) for k, v in config.items() if k.split(".")[0] in ("data", "loss")))


def _spread(by_seed: dict[int, RunFiles], of: str) -> tuple[str, str]:
    """The mean and standard deviation of a metric, which is named where it is not that `of` all, and the seeds that completed."""
    values = [v for run in by_seed.values() if run.status == "completed" and (v := run.final()) is not None]
    metric = next((run.metric for run in by_seed.values() if run.metric), None)
    named = f"{metric[0]} " if metric and not of else ""
    found = f"{named}{statistics.mean(values):.4f} ± {deviation(values):.4f}" if len(values) > 1 else "–"
    return found, f"{len(values)}" if len(values) == len(by_seed) else f"{len(values)} of {len(by_seed)} completed"


MAX_CURVES = 60  # runs with curves
MOST_TABLES = 6  # runs whose confusion matrices are shown; those of more are in their result.json
MOST_SETTINGS = 12  # settings that are drawn
MOST_NAMES = 8  # values of a setting that are no numbers
OVER = ("updates", "samples", "seconds")


def rank(run: RunFiles) -> tuple[bool, float]:
    """The place of a run by its metric, the least the best; runs without a value come last."""
    value, metric = run.best(), run.metric
    if value is None or metric is None or not math.isfinite(value):
        return True, 0.0
    return False, -value if metric[1] else value


def sheet_of(runs: Sequence[RunFiles], asked: Target = None, folder: Path = Path()) -> tuple[Sheet, Table]:
    """The sheet of runs: the answer, the table, the metric over each setting, and curves; and the whole table, for a CSV file.

    With a target that was `asked` for, the runs stand by their time to it. The page is in `folder`, from where links lead to the
    runs' pages.
    """
    seeds = summarize_seeds(runs, asked)
    target, ranked = common_target(runs) if asked is None else asked, asked is not None
    if asked is not None:
        runs = sorted(runs, key=lambda run: (run.to_target(asked) or (math.inf,))[0])
    found = table(runs, target, ranked)
    called = [row[0] for row in found.texts()]
    drawn = [runs[n] for n in sorted(sorted(range(len(runs)), key=lambda n: rank(runs[n]))[:MAX_CURVES])]  # as they were started
    shown = [f"Curves are those of the best {MAX_CURVES}."] if len(runs) > MAX_CURVES else []
    if not seeds.rows and len(runs) > 1:
        shown.append("Each config ran with one seed. Several, as in runtime.seed=0,1,2, tell whether a difference is chance.")
    differing_table, same = found.differing(always=3)
    shown += [f"The same for all: {', '.join(f'{name} {cell}' for name, cell in same)}."] if same else []
    body: list[Section] = (
        under("The metric over each setting", PagePart(charts.grid(settings))) if (settings := _settings(runs)) else []
    )
    names = {id(each): name for each, name in zip(runs, called, strict=True)}
    body += _curves(drawn, names)
    for each in [r for r in drawn if r.result and r.result.tables][:MOST_TABLES]:
        assert each.result is not None
        of_what, tables_found = plots.of_result(each.result.tables)
        title = f"Classes of {names[id(each)]}"
        body.append(folded(title, charts.sections(tables_found, f"{names[id(each)]}, {of_what}", 3)))
    again = {names[id(each)]: f"drivetrain train {shlex.join(run_page.overrides_of(each))}".strip() for each in drawn}
    each_of = [part for name, line in again.items() for part in (words(name), commands(line))]
    body += under("How to reproduce them", folded("The command of each run", each_of, len(runs) < 8))
    body += under("Where they ran", *_environments(runs, names))
    over = under("Over seeds", seeds) if seeds.rows else []
    first = [_table(runs, differing_table, target, ranked, folder), remarks(*shown), *over]
    answer = verdict(runs, called, asked)
    return Sheet("Runs compared – drivetrain report", answer, [*first, PagePart(joined(body))]), found


def _winner(runs: Sequence[RunFiles], target: Target, ranked: bool) -> int | None:
    """The number of the run that is highlighted: the first at the target, or else the best by the metric that all share."""
    if ranked and target is not None:
        return 0 if runs[0].to_target(target) is not None else None
    best = min(range(len(runs)), key=lambda n: rank(runs[n]))
    return best if not rank(runs[best])[0] and len({r.metric for r in runs if r.metric}) == 1 else None


def _table(runs: Sequence[RunFiles], found: Table, target: Target, ranked: bool, folder: Path) -> Table:
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
    files = [os.path.relpath(page, folder) if (page := run.path / run_page.FILE).exists() else "" for run in runs]
    rows = [[Drawn(str(name), file=file), *row] for file, (name, *row) in zip(files, found.rows, strict=True)]
    return replace(found, rows=rows, name="The runs", prose=("error", "folder"), sortable=True, winner=winner, bars=bars)


def _curves(runs: Sequence[RunFiles], names: dict[int, str]) -> list[Section]:
    """Loss and metric of the runs; the reader chooses over what."""
    metric = next((each.metric[0] for each in runs if each.metric), None)
    drawn: list[str] = []
    for n, over in enumerate(OVER):
        losses = [ChartLine(names[id(r)], run_page.points(r.train, over, "loss")) for r in runs]
        log = charts.spans_decades([y for curve in losses for _, y in curve.points])
        title = "Training loss" + (" (logarithmic axis)" if log else "")
        drawn.append(charts.curves(title, losses, over, log, kind=f"over{n}"))
        if metric is not None:
            of_set = next(each.evaluated.set for each in runs if each.metric)
            judged = [ChartLine(names[id(r)], run_page.points(r.evaluated, over, metric)) for r in runs]
            drawn.append(charts.curves(f"{metric.capitalize()}, {of_set} set", judged, over, kind=f"over{n}"))
    return run_page.switched("How they went", OVER, drawn)


def _settings(runs: Sequence[RunFiles]) -> list[str]:
    """The best value of the metric over each setting in which the runs differ, and the mean for each of its values."""
    metric = next((each.metric[0] for each in runs if each.metric), None)
    found = []
    given = {key_of(word) for run in runs for word in run_page.overrides_of(run)} - {"runtime.seed"}
    keys = [key for key in differing(runs) if key != "runtime.seed"]
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


def _environments(runs: Sequence[RunFiles], names: dict[int, str]) -> list[Section]:
    """Each environment once, with the runs in it."""
    found: dict[str, tuple[Section, list[str]]] = {}
    for each in runs:
        about = run_page.environment(each)
        found.setdefault(about.html, (about, []))[1].append(names[id(each)])
    if len(found) == 1:
        return [about for about, _ in found.values()]
    return [
        part for about, of in found.values()
        for part in (words(f"{'; '.join(of[:20])}{' …' if len(of) > 20 else ''}:"), about)
    ]  # fmt: skip


MAX_ROWS = 40  # in the terminal
SPARE = (  # columns that a narrow table leaves out, in this order
    "folder", "samples/s, middle 80 %", "update, 95th percentile", "updates made", "compiling", "waiting for data", "peak memory",
    "update, median", "run time", "samples/s",
)  # fmt: skip
LOOKED_AT = 512  # samples of a set, at random; the worst of them are shown
MOMENTS = 2.0  # seconds of training: so many samples are looked at when a run ends
UNREADABLE = "its result.json is none that drivetrain writes"


@dataclass
class ReportSettings:
    """The settings of `drivetrain report`."""

    # A value of the metric, or accuracy>=0.98. None: the worst of the completed runs' best values
    target: float | str | None = None
    samples: CountOrZero = 12  # of the page of one run: the worst ones, and as many others
    out: str | None = None  # a folder; None: the folder of the one run, or a new one under outputs/report


def command(argv: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain report`; return its exit code. Runs know their own `config_dirs`."""
    settings, rest = verbs.split(argv, ReportSettings)
    refuse(
        f"'{argument}' is no setting of report, which has target=, samples= and out=, nor a folder"
        for argument in rest
        if "=" in argument and not Path(argument).exists()
    )
    given = settings.target
    target: Target = Reach.parse(given) if isinstance(given, str) else given
    if target is None and given is not None:
        raise UserError(f"target={given}: give a number of the runs' own metric, or a metric's value as 'target=accuracy>=0.98'")
    runs = find([expanded(argument) for argument in rest or ["outputs"]])
    if isinstance(target, Reach) and not any(target.metric in values for run in runs for values in run.evaluated.values):
        raise UserError(f"target={target}: no run has evaluated {target.metric}")
    if len(runs) == 1:
        if target is not None:
            echo(sentence(f"{runs[0].path.name} {alone_at(runs[0], target)}"))
        return _of_one(runs[0], table(runs, common_target(runs) if target is None else target), settings)
    if isinstance(target, Reach) and not put_on_one_clock(runs, target):
        echo("The seconds to the target count from each run's first record: not all that reached it have noted it (target=).")
    sheet, table_of_all = sheet_of(runs, target, folder := _folder(settings.out))
    sheet.show()
    return _write(sheet, table_of_all, folder)


def of_sweep(folder: Path) -> None:
    """Write the page and the CSV of a sweep's runs into its folder, where some began and the disk has room."""
    with suppress(OSError, UserError):
        _write(*sheet_of(find([folder]), None, folder), folder)


def _of_one(run: RunFiles, found: Table, settings: ReportSettings) -> int:
    """Write the page of a run into its own folder, or into `out` with the CSV."""
    sheet = _with_samples(run, settings.samples)
    echo(sentence(sheet.answer))
    if settings.out is None:
        try:
            echo(f"written to {sheet.write(run.path / run_page.FILE)}")
            return DONE
        except OSError as error:
            echo(f"{run.path} takes no page ({error.strerror})")
    return _write(sheet, found, _folder(settings.out))


def _with_samples(run: RunFiles, count: int, most: int = LOOKED_AT) -> Sheet:
    """A run's page with `count` of the worst of `most` samples and as many others, where it has kept its weights."""
    shown: list[Section] = []
    if count and (run.path / "checkpoints").is_dir():
        shown = samples_of(run, count, most)
    return run_page.sheet_of(run, shown)


def add_samples(result: Result) -> None:
    """Add samples to the page that a run of one process left, as many as it trained on in some moments."""
    place = result.run_dir / run_page.FILE if result.run_dir is not None else None
    if place is not None and place.exists() and result.status == "completed" and result.world_size == 1:
        most = min(LOOKED_AT, max(ReportSettings.samples, int(MOMENTS * (result.samples_per_second or 0))))
        with suppress(OSError):  # a full disk loses the samples
            _with_samples(read(place.parent), ReportSettings.samples, most).write(place)


def _folder(out: str | None) -> Path:
    """The folder that was named, or else a new one."""
    return expanded(out) if out else directory.create(Path("outputs"), "report")


def _write(sheet: Sheet, found: Table, folder: Path) -> int:
    """Write the page and the CSV to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found.write_csv(folder / "report.csv")
    sheet.write(folder / run_page.FILE)
    echo(f"written to {folder}/{run_page.FILE} and report.csv")
    return DONE


def time_to(target: Target) -> str:
    """The name of the column of seconds to a target."""
    return f"time to {_said(target)}"


def common_target(runs: Sequence[RunFiles]) -> float | None:
    """The metric's value that all completed runs reached: the worst of their best values. None where their metrics differ."""
    found = [(run.best(), run.metric) for run in runs if run.status == "completed" and run.metric]
    values = [value for value, _ in found if value is not None]
    return ((min if found[0][1][1] else max)(values)) if values and len({metric for _, metric in found}) == 1 else None


def named(runs: Sequence[RunFiles], without: Collection[str] = ()) -> list[str]:
    """A name for each run: the overrides that not all runs have, and a number where several have the same."""
    words = [[word for word in run.label.split() if key_of(word) not in without] for run in runs]
    common = set(words[0]).intersection(*words[1:]) if len(words) > 1 else set()
    names = [" ".join(word for word in each if word not in common) or "the default" for each in words]
    seen: Counter[str] = Counter()
    for n, name in enumerate(names):
        seen[name] += 1
        names[n] = f"{name} (run {seen[name]})" if names.count(name) + seen[name] > 2 else name
    return names


def verdict(runs: Sequence[RunFiles], names: Sequence[str], target: Target = None) -> str:
    """The best run, or the first at a target, in one sentence."""
    completed = sum(run.status == "completed" for run in runs)
    of = f"Of {len(runs)} runs" + (f", {completed} of which completed," if completed < len(runs) else ",")
    if target is not None:
        return f"{of} {_first_at(runs, names, target)}"
    metrics = {run.metric for run in runs if run.metric}
    placed = sorted((n for n, run in enumerate(runs) if not rank(run)[0]), key=lambda n: rank(runs[n]))
    if not placed:
        return f"{of} none has been evaluated"
    if len(metrics) > 1:
        return f"{of} none is the best: they use different metrics ({', '.join(sorted(metric[0] for metric in metrics))})"
    values = [runs[n].best() or 0.0 for n in placed]
    ((metric, _),), (n, *_), best, worst = metrics, placed, values[0], values[-1]
    ties, of_set = values.count(best), runs[n].evaluated.set
    if ties == len(values) > 1:
        return f"{of} all reached the same: {metric} {best:.4f} on the {of_set} set"
    others = "has 1 other" if ties == 2 else f"have {ties - 1} others"
    also = f" (as {others})" if ties > 1 else ""
    against = f", and the worst {worst:.4f}" if len(values) > 1 else ""
    return f"{of} {names[n]} is the best{also}: it reached {metric} {best:.4f} on the {of_set} set{against}"


def _first_at(runs: Sequence[RunFiles], names: Sequence[str], target: float | Reach) -> str:
    """The run that reached a target first, in the rest of a sentence."""
    what = _said(target)
    reached = sorted((found[0], n) for n, run in enumerate(runs) if (found := run.to_target(target)) is not None)
    if not reached:
        return f"none reached {what}"
    seconds, n = reached[0]
    others = (
        f"; {len(reached)} of them reached it" if len(reached) < len(runs) else f", and the last after {reached[-1][0]:.1f} s"
    )
    return f"{names[n]} reached {what} first, after {seconds:.1f} s{others}"


def alone_at(run: RunFiles, target: float | Reach) -> str:
    """The time when a run reached a target, in the rest of a sentence."""
    what = _said(target)
    if (reached := run.to_target(target)) is None:
        return f"has not reached {what}"
    seconds, update = reached
    noted = isinstance(target, Reach) and run.noted(target) is not None
    since = "the start of its process" if noted else "its first record"
    return f"reached {what} after {update:,} updates, {seconds:.1f} s after {since}"


def table(runs: Sequence[RunFiles], target: Target, ranked: bool = False) -> Table:
    """The table: name, metric, speed, then the keys that differ and the other figures; no column that is empty in all rows.

    `ranked`: the time to the target stands beside the name.
    """
    keys = sorted(differing(runs), key=lambda key: "." in key)  # options before their settings
    metrics = {run.metric[0] for run in runs if run.metric}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    found = [_figures(run, target, metric) for run in runs]
    figures = {name: [each[name] for each in found] for name in found[0]}
    taken = {"run", *figures}  # a key of the config may have a figure's name
    first = [*([time_to(target)] if ranked else []), f"best {metric}", "samples/s", "status"]
    columns = {"run": named(runs), **{name: figures.pop(name) for name in first}}
    columns |= {f"{key} (config)" if key in taken else key: [setting(run.config.get(key)) for run in runs] for key in keys}
    settings = sorted(keys, key=lambda name: "." not in name)  # the run's name has those that were set
    spare = [*SPARE, *([] if ranked else [time_to(target)]), f"{metric} at the end", "error", *settings]
    return Table.of(columns | figures, spare=spare, width=WIDTH, most=MAX_ROWS).used(4)


def _figures(run: RunFiles, target: Target, metric: str) -> dict[str, str]:
    """A run's figures as text, from its result, or from its records so far."""
    r, rates = run.result, run.rates()
    form = f"{run.metric[0]} {{:.4f}}" if metric == "metric" and run.metric else "{:.4f}"
    reached = run.to_target(target) if target is not None else None
    return {
        f"best {metric}": figure(run.best(), form),
        "samples/s": figure(r.samples_per_second if r else statistics.median(rates) if rates else None, "{:,.0f}"),
        "status": run.status,
        f"{metric} at the end": figure(run.final(), form),
        time_to(target): f"{reached[0]:.1f} s" if reached else "–",
        "run time": figure(r.wall_s if r else run.train.seconds[-1] if run.train.seconds else None, "{:.1f} s"),
        "update, median": figure(r.step_ms_p50 if r else None, "{:.2f} ms"),
        "update, 95th percentile": figure(r.step_ms_p95 if r else None, "{:.2f} ms"),
        "waiting for data": figure(100 * r.data_wait_fraction if r and r.data_wait_fraction is not None else None, "{:.1f} %"),
        "peak memory": figure(r.peak_memory_bytes / 2**30 if r and r.peak_memory_bytes else None, "{:.2f} GiB"),
        "compiling": figure(r.compile_s if r else None, "{:.1f} s"),
        "samples/s, middle 80 %": f"{rates[len(rates) // 10]:,.0f}–{rates[len(rates) * 9 // 10]:,.0f}" if rates else "–",
        "updates made": str(r.updates if r else run.train.updates[-1] if run.train.updates else 0),
        "folder": str(run.path),
        "error": r.in_short if r else UNREADABLE if run.status == "unreadable" else "",
    }
