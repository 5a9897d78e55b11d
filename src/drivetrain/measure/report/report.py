"""`drivetrain report DIR…`: any runs and sweeps as one table, one CSV file and one page."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drivetrain.core.errors import DONE, UserError
from drivetrain.core.option import CountOrZero
from drivetrain.core.paths import expanded
from drivetrain.core.target import Reach
from drivetrain.measure import arguments
from drivetrain.measure.cells import figure, setting
from drivetrain.measure.report.over_seeds import Target, seconds_to, summarize_seeds
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, differing, find, put_on_one_clock
from drivetrain.ui.output import echo
from drivetrain.ui.pages import run as run_page
from drivetrain.ui.sheet import Section, sentence
from drivetrain.ui.sheet import Table as SheetTable

MAX_ROWS, WIDTH, LONGEST = 40, 100, 48  # rows in the terminal, characters where there is none, and of a cell
# Columns that a narrow table leaves out, in order.
SPARE = (
    "waiting for data",
    "peak memory",
    "update, median",
    "run time",
    "samples/s",
)
UNREADABLE = "its result.json is none that drivetrain writes"


@dataclass
class Settings:
    """The settings of `drivetrain report`."""

    # A value of the metric, or accuracy>=0.98. None: the worst of the completed runs' best values
    target: float | str | None = None
    samples: CountOrZero = 12  # of the page of one run: the worst ones, and as many others
    out: str | None = None  # a folder; None: the folder of the one run, or a new one under outputs/report


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain report`; return its exit code."""
    settings, rest = arguments.split(argv, Settings)
    if wrong := [argument for argument in rest if "=" in argument and not Path(argument).exists()]:
        known = "which has target=, samples= and out="
        raise UserError([f"'{argument}' is no setting of report, {known}, nor a folder" for argument in wrong])
    target = read_target(settings.target)
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
    folder = _folder(settings)
    sheet.write(folder / run_page.FILE)
    _write_csv(folder, found)
    echo(f"written to {folder}/{run_page.FILE} and report.csv")
    return DONE


def _of_several(runs: Sequence[RunFiles], asked: Target, settings: Settings) -> int:
    """Show the table, and write the page and the CSV. With a target that was asked for, the runs are ranked by it."""
    seeds = summarize_seeds(runs, asked)
    target = common_target(runs) if asked is None else asked
    runs = runs if asked is None else sorted(runs, key=lambda run: seconds_to(run, asked))
    found = table(runs, target, first=asked is not None)
    answer = verdict(runs, found.names, asked)
    shown, cells = _for_terminal(found)
    timed = [name for name in shown if name.startswith("time to ")] if asked is None else []
    spare = [*SPARE, *timed, *(name for name in shown if name.endswith(" at the end"))]
    knobs = sorted(shown[:2:-1], key=lambda name: "." not in name)  # the run's name has those that were set
    kept = ("status", *(name for name in shown if asked is not None and name.startswith("time to ")))
    spare += ["error", *(name for name in knobs if name not in kept)]
    SheetTable(shown, cells, spare=spare, width=WIDTH).show()
    if len(runs) > MAX_ROWS:
        echo(f"… and {len(runs) - MAX_ROWS} more, all in the page and the CSV")
    for line in [*seeds, sentence(answer)]:
        echo(line)
    from drivetrain.measure.report.page import sheet_of

    folder = _folder(settings)
    _write_csv(folder, found)
    sheet_of(runs, found, answer, target, seeds, asked is not None).write(folder / run_page.FILE)
    echo(f"written to {folder}/{run_page.FILE} and report.csv")
    return DONE


def _folder(settings: Settings) -> Path:
    folder = expanded(settings.out) if settings.out else directory.create(Path("outputs"), "report")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_csv(folder: Path, found: Table) -> None:
    SheetTable(found.header, found.rows).write_csv(folder / "report.csv")


def read_target(given: float | str | None) -> Target:
    """The target of a report as it was given. Raises UserError where a text names none."""
    found = Reach.parse(given) if isinstance(given, str) else given
    if found is None and given is not None:
        raise UserError(f"target={given}: give a number of the runs' own metric, or a metric's value as 'target=accuracy>=0.98'")
    return found


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


class Table(NamedTuple):
    """The table of several runs, its cells as text."""

    names: list[str]
    header: list[str]
    rows: list[list[str]]


def table(runs: Sequence[RunFiles], target: Target, first: bool = False) -> Table:
    """The table: name, metric, speed, then the keys that differ and the other figures; no column that is empty in all rows.

    `first`: the time to the target stands beside the name.
    """
    keys, names = sorted(differing(runs), key=lambda key: "." in key), named(runs)  # options before their knobs
    metrics = {run.metric[0] for run in runs if run.metric}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    header = [
        "run", f"best {metric}", "samples/s", "status", *keys, f"{metric} at the end",
        time_to(target), "run time", "update, median",
        "update, 95th percentile", "waiting for data", "peak memory", "compiling", "samples/s, middle 80 %", "updates made",
        "folder", "error",
    ]  # fmt: skip
    # A key of the config may have a figure's name.
    header = [name if name not in header[:n] else f"{name} ({n})" for n, name in enumerate(header)]
    rows = []
    for name, run in zip(names, runs, strict=True):
        best, speed, *rest = _figures(run, target, metric == "metric")
        rows.append([name, best, speed, run.status, *(setting(run.config.get(k)) for k in keys), *rest])
    if first:
        at = header.index(time_to(target))
        for cells in (header, *rows):
            cells.insert(1, cells.pop(at))
    used = [n for n in range(len(header)) if n < 4 or any(row[n] not in ("–", "") for row in rows)]
    return Table(names, [header[n] for n in used], [[row[n] for n in used] for row in rows])


def _figures(run: RunFiles, target: Target, named: bool) -> list[str]:
    """A run's figures as text, from its result, or from its records so far; `named`: its metric with the name."""
    r, rates = run.result, run.rates()
    form = f"{run.metric[0]} {{:.4f}}" if named and run.metric else "{:.4f}"
    reached = run.to_target(target) if target is not None else None
    return [
        figure(run.best(), form),
        figure(r.samples_per_second if r else statistics.median(rates) if rates else None, "{:,.0f}"),
        figure(run.final(), form),
        f"{reached[0]:.1f} s" if reached else "–",
        figure(r.wall_s if r else run.train.seconds[-1] if run.train.seconds else None, "{:.1f} s"),
        figure(r.step_ms_p50 if r else None, "{:.2f} ms"),
        figure(r.step_ms_p95 if r else None, "{:.2f} ms"),
        figure(100 * r.data_wait_fraction if r and r.data_wait_fraction is not None else None, "{:.1f} %"),
        figure(r.peak_memory_bytes / 2**30 if r and r.peak_memory_bytes else None, "{:.2f} GiB"),
        figure(r.compile_s if r else None, "{:.1f} s"),
        f"{rates[len(rates) // 10]:,.0f}–{rates[len(rates) * 9 // 10]:,.0f}" if rates else "–",
        str(r.updates if r else run.train.updates[-1] if run.train.updates else 0),
        str(run.path),
        ((r.error or "") if r else UNREADABLE if run.status == "unreadable" else "").split("\n")[0],
    ]


def _for_terminal(found: Table) -> tuple[list[str], list[list[str]]]:
    """The first rows, without the columns that matter least, and those that say the same of all."""
    left_out = {"folder", "samples/s, middle 80 %", "update, 95th percentile", "updates made", "compiling"}
    shown, _ = SheetTable(found.header, found.rows).differing(always=3)
    kept = [n for n, name in enumerate(shown.header) if name not in left_out]
    return [shown.header[n] for n in kept], [[_cut(row[n]) for n in kept] for row in shown.texts()[:MAX_ROWS]]


def _cut(cell: str) -> str:
    return cell if len(cell) <= LONGEST else f"{cell[: LONGEST - 1]}…"
