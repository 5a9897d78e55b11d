"""`drivetrain report DIR…`: any runs and sweeps as one table, one CSV file and one page."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core.errors import DONE, UserError
from drivetrain.core.option import CountOrZero
from drivetrain.core.paths import expanded
from drivetrain.core.target import Reach
from drivetrain.measure import arguments
from drivetrain.measure.report.page import Target, seconds_to, summarize_seeds
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, differing, find, put_on_one_clock
from drivetrain.ui.output import echo
from drivetrain.ui.pages import run as run_page
from drivetrain.ui.sheet import Section, Sheet, Table, figure, sentence, setting

MAX_ROWS, WIDTH = 40, 100  # rows in the terminal, and characters where there is none
SPARE = (  # columns that a narrow table leaves out, in this order
    "folder", "samples/s, middle 80 %", "update, 95th percentile", "updates made", "compiling", "waiting for data", "peak memory",
    "update, median", "run time", "samples/s",
)  # fmt: skip
UNREADABLE = "its result.json is none that drivetrain writes"


@dataclass
class Settings:
    """The settings of `drivetrain report`."""

    # A value of the metric, or accuracy>=0.98. None: the worst of the completed runs' best values
    target: float | str | None = None
    samples: CountOrZero = 12  # of the page of one run: the worst ones, and as many others
    out: str | None = None  # a folder; None: the folder of the one run, or a new one under outputs/report


def command(argv: Sequence[str], config_dirs: Sequence[str] = ()) -> int:
    """Run `drivetrain report`; return its exit code. Runs know their own `config_dirs`."""
    settings, rest = arguments.split(argv, Settings)
    if wrong := [argument for argument in rest if "=" in argument and not Path(argument).exists()]:
        known = "which has target=, samples= and out="
        raise UserError([f"'{argument}' is no setting of report, {known}, nor a folder" for argument in wrong])
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
    return _of_several(runs, target, settings)


def _of_one(run: RunFiles, found: Table, settings: Settings) -> int:
    """Write the page of a run into its own folder, or into `out` with the CSV."""
    shown: list[Section] = []
    if settings.samples and (run.path / "checkpoints").is_dir():
        from drivetrain.measure.report import samples

        shown = samples.sections(run.path, settings.samples)
    sheet = run_page.sheet_of(run, shown)
    echo(sentence(sheet.answer))
    if settings.out is None:
        try:
            echo(f"written to {sheet.write(run.path / run_page.FILE)}")
            return DONE
        except OSError as error:
            echo(f"{run.path} takes no page ({error.strerror})")
    return _write(sheet, found, settings)


def _of_several(runs: Sequence[RunFiles], asked: Target, settings: Settings) -> int:
    """Show the table, and write the page and the CSV. With a target that was asked for, the runs are ranked by it."""
    seeds = summarize_seeds(runs, asked)
    target = common_target(runs) if asked is None else asked
    runs = runs if asked is None else sorted(runs, key=lambda run: seconds_to(run, asked))
    found = table(runs, target, asked is not None)
    from drivetrain.measure.report.page import sheet_of

    names = [row[0] for row in found.texts()]
    sheet = sheet_of(runs, found, verdict(runs, names, asked), target, seeds, asked is not None)
    sheet.show()
    return _write(sheet, found, settings)


def _write(sheet: Sheet, found: Table, settings: Settings) -> int:
    """Write the page and the CSV to `out`, or to a new folder."""
    folder = expanded(settings.out) if settings.out else directory.create(Path("outputs"), "report")
    folder.mkdir(parents=True, exist_ok=True)
    found.write_csv(folder / "report.csv")
    sheet.write(folder / run_page.FILE)
    echo(f"written to {folder}/{run_page.FILE} and report.csv")
    return DONE


def time_to(target: Target) -> str:
    """The name of the column of seconds to a target."""
    return f"time to {target if isinstance(target, Reach) else 'target' if target is None else f'{target:.4g}'}"


def common_target(runs: Sequence[RunFiles]) -> float | None:
    """The metric's value that all completed runs reached: the worst of their best values. None where their metrics differ."""
    found = [(run.best(), run.metric) for run in runs if run.status == "completed" and run.metric]
    values = [value for value, _ in found if value is not None]
    return ((min if found[0][1][1] else max)(values)) if values and len({metric for _, metric in found}) == 1 else None


def named(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run: the overrides that not all runs have, and a number where several have the same."""
    words = [run.label.split() for run in runs]
    common = set(words[0]).intersection(*words[1:]) if len(words) > 1 else set()
    names = [" ".join(word for word in each if word not in common) or "the default" for each in words]
    seen: Counter[str] = Counter()
    for n, name in enumerate(names):
        seen[name] += 1
        names[n] = f"{name} (run {seen[name]})" if names.count(name) + seen[name] > 2 else name
    return names


def verdict(runs: Sequence[RunFiles], names: Sequence[str], target: Target = None) -> str:
    """Which run is the best, or is at a target first, in one sentence."""
    completed = sum(run.status == "completed" for run in runs)
    of = f"Of {len(runs)} runs" + (f", {completed} of which completed," if completed < len(runs) else ",")
    if target is not None:
        return f"{of} {_first_at(runs, names, target)}"
    metrics = {run.metric for run in runs if run.metric}
    values = [(value, n) for n, run in enumerate(runs) if (value := run.best()) is not None and math.isfinite(value)]
    if not values:
        return f"{of} none has been evaluated"
    if len(metrics) > 1:
        return f"{of} none is the best: they use different metrics ({', '.join(sorted(metric[0] for metric in metrics))})"
    (metric, more) = metrics.pop()
    ranked = sorted(values, reverse=more)
    (best, n), (worst, _) = ranked[0], ranked[-1]
    ties = sum(value == best for value, _ in values)
    of_set = runs[n].evaluated.set
    if ties == len(values) > 1:
        return f"{of} all reached the same: {metric} {best:.4f} on the {of_set} set"
    others = "has 1 other" if ties == 2 else f"have {ties - 1} others"
    also = f" (as {others})" if ties > 1 else ""
    against = f", and the worst {worst:.4f}" if len(values) > 1 else ""
    return f"{of} {names[n]} is the best{also}: it reached {metric} {best:.4f} on the {of_set} set{against}"


def _first_at(runs: Sequence[RunFiles], names: Sequence[str], target: float | Reach) -> str:
    """Which run reached a target first, in the rest of a sentence."""
    what = str(target) if isinstance(target, Reach) else f"{target:.4g}"
    reached = sorted((seconds, n) for n, run in enumerate(runs) if math.isfinite(seconds := seconds_to(run, target)))
    if not reached:
        return f"none reached {what}"
    seconds, n = reached[0]
    others = (
        f"; {len(reached)} of them reached it" if len(reached) < len(runs) else f", and the last after {reached[-1][0]:.1f} s"
    )
    return f"{names[n]} reached {what} first, after {seconds:.1f} s{others}"


def alone_at(run: RunFiles, target: float | Reach) -> str:
    """When a run reached a target, in the rest of a sentence."""
    what = str(target) if isinstance(target, Reach) else f"{target:.4g}"
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
    keys = sorted(differing(runs), key=lambda key: "." in key)  # options before their knobs
    metrics = {run.metric[0] for run in runs if run.metric}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    found = [_figures(run, target, metric) for run in runs]
    figures = {name: [each[name] for each in found] for name in found[0]}
    taken = {"run", *figures}  # a key of the config may have a figure's name
    first = [*([time_to(target)] if ranked else []), f"best {metric}", "samples/s", "status"]
    columns = {"run": named(runs), **{name: figures.pop(name) for name in first}}
    columns |= {f"{key} (config)" if key in taken else key: [setting(run.config.get(key)) for run in runs] for key in keys}
    knobs = sorted(keys, key=lambda name: "." not in name)  # the run's name has those that were set
    spare = [*SPARE, *([] if ranked else [time_to(target)]), f"{metric} at the end", "error", *knobs]
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
        "error": ((r.error or r.warning or "") if r else UNREADABLE if run.status == "unreadable" else "").split("\n")[0],
    }
