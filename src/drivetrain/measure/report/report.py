"""`drivetrain report DIR…`: any runs and sweeps as one table, one CSV file and one page."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core.errors import DONE, UserError
from drivetrain.core.selection import Selection
from drivetrain.core.typed import fits
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import noninferiority, quality
from drivetrain.measure.cells import figure, setting, spreadsheet
from drivetrain.measure.intervals import deviation
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, differing, find
from drivetrain.ui import terminal
from drivetrain.ui.output import echo

ENDED = ("completed", "failed", "diverged")  # the statuses of runs that ended by themselves
MAX_ROWS, WIDTH = 40, 100  # rows in the terminal, and characters where there is none
SPARE = ("compile", "data wait", "memory", "step p50", "wall", "samples/s")  # columns that a narrow table leaves out, in order
UNREADABLE = "its result.json is none that drivetrain writes"


@dataclass
class Settings:
    """The settings of `drivetrain report`."""

    target: float | None = None  # of the metric; None: the worst of the completed runs' best values
    out: str | None = None  # a folder; None: a new one under outputs/report


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain report`; return its exit code."""
    settings, rest = arguments.split(argv, Settings)
    if wrong := [argument for argument in rest if "=" in argument and not Path(argument).exists()]:
        raise UserError([f"'{argument}' is no setting of report, which has target= and out=, nor a folder" for argument in wrong])
    runs = find([Path(argument).expanduser() for argument in rest or ["outputs"]])
    target = settings.target if settings.target is not None else common_target(runs)
    header, rows = table(runs, target)
    shown, cells = _for_terminal(header, rows)
    terminal.table_that_fits(shown, cells, [*SPARE, *(name for name in shown if name.startswith(("to ", "best ")))], WIDTH)
    if len(rows) > MAX_ROWS:
        echo(f"… and {len(rows) - MAX_ROWS} more, all in the page and the CSV")
    seeds = summarize_seeds(runs)
    for line in seeds:
        echo(line)
    from drivetrain.measure.report.page import report_page

    folder = Path(settings.out).expanduser() if settings.out else directory.create(Path("outputs"), "report")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "report.csv").open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        csv.writer(file).writerows([spreadsheet(cell) for cell in row] for row in [header, *rows])
    page = report_page(runs, header, rows, target, seeds)
    (folder / "report.html").write_text(page, encoding="utf-8", errors="backslashreplace")
    echo(f"written to {folder}/report.html and report.csv")
    return DONE


def common_target(runs: Sequence[RunFiles]) -> float | None:
    """The metric's value that all completed runs reached: the worst of their best values. None where their metrics differ."""
    found = [(run.best(), run.metric) for run in runs if run.status == "completed" and run.metric]
    values = [value for value, _ in found if value is not None]
    return ((min if found[0][1][1] else max)(values)) if values and len({metric for _, metric in found}) == 1 else None


def table(runs: Sequence[RunFiles], target: float | None) -> tuple[list[str], list[list[str]]]:
    """Header and rows as text, without the columns that no run has a value for."""
    keys = differing(runs)
    names = {run.metric[0] for run in runs if run.metric}
    metric = names.pop() if len(names) == 1 else "metric"
    header = [
        "run", "status", *keys, metric, f"best {metric}", "samples/s", "p10–p90", "step p50", "step p95", "data wait",
        "memory", "compile", f"to {target:.4g}" if target is not None else "to target", "wall", "updates made", "folder", "error",
    ]  # fmt: skip
    # A key of the config may have a figure's name.
    header = [name if name not in header[:n] else f"{name} ({n})" for n, name in enumerate(header)]
    rows = [
        [str(n), run.status, *(setting(run.config.get(k)) for k in keys), *_figures(run, target, metric == "metric")]
        for n, run in enumerate(runs)
    ]
    used = [n for n in range(len(header)) if n < 2 or any(row[n] not in ("–", "") for row in rows)]
    return [header[n] for n in used], [[row[n] for n in used] for row in rows]


def _figures(run: RunFiles, target: float | None, named: bool) -> list[str]:
    """A run's figures as text, from its result, or from its records so far; `named`: its metric with the name."""
    r, rates = run.result, run.rates()
    form = f"{run.metric[0]} {{:.4f}}" if named and run.metric else "{:.4f}"
    reached = run.to_target(target) if target is not None else None
    return [
        figure(run.final(), form),
        figure(run.best(), form),
        figure(r.samples_per_second if r else statistics.median(rates) if rates else None, "{:,.0f}"),
        f"{rates[len(rates) // 10]:,.0f}–{rates[len(rates) * 9 // 10]:,.0f}" if rates else "–",
        figure(r.step_ms_p50 if r else None, "{:.2f} ms"),
        figure(r.step_ms_p95 if r else None, "{:.2f} ms"),
        figure(100 * r.data_wait_fraction if r and r.data_wait_fraction is not None else None, "{:.1f} %"),
        figure(r.peak_memory_bytes / 2**30 if r and r.peak_memory_bytes else None, "{:.2f} GiB"),
        figure(r.compile_s if r else None, "{:.1f} s"),
        f"{reached[0]:.1f} s" if reached else "–",
        figure(r.wall_s if r else run.train.seconds[-1] if run.train.seconds else None, "{:.1f} s"),
        str(r.updates if r else run.train.updates[-1] if run.train.updates else 0),
        str(run.path),
        ((r.error or "") if r else UNREADABLE if run.status == "unreadable" else "").split("\n")[0],
    ]


def _for_terminal(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The first rows, without the columns that matter least."""
    left_out = ("folder", "p10–p90", "step p95", "updates made")
    kept = [n for n, name in enumerate(header) if name not in left_out]
    return [header[n] for n in kept], [[row[n] for n in kept] for row in rows[:MAX_ROWS]]


def summarize_seeds(runs: Sequence[RunFiles]) -> list[str]:
    """A line for each config that was run with several seeds: its metric's mean and spread, and the verdict on its quality.

    The verdict is against the first such config on the same data and loss, the oldest, seed by seed. Runs that were stopped
    are left out.
    """
    groups: dict[str, dict[int, RunFiles]] = {}
    for run in runs:
        if run.config and run.status in ENDED:
            key = str(sorted((k, str(v)) for k, v in run.config.items() if k != "runtime.seed"))
            group, seed = groups.setdefault(key, {}), run.config.get("runtime.seed", 0)
            if not fits(seed, int):
                continue
            if run.status == "completed" or seed not in group:
                group[seed] = run
    configs = [by_seed for by_seed in groups.values() if len(by_seed) > 1]
    lines = [_spread(by_seed) for by_seed in configs]
    for n, by_seed in enumerate(configs[1:], 1):
        first = next(other for other in configs if _task(other) == _task(by_seed))
        seeds = sorted(by_seed.keys() & first.keys())
        if first is not by_seed and len(seeds) > 1 and first[seeds[0]].metric is not None:
            lines[n] += f"; {_verdict([by_seed[s] for s in seeds], [first[s] for s in seeds], seeds)}"
    return lines


def _task(by_seed: dict[int, RunFiles]) -> str:
    """The runs' data and loss."""
    config = next(iter(by_seed.values())).config
    return str(sorted((k, str(v)) for k, v in config.items() if k.split(".")[0] in ("data", "loss")))


def _spread(by_seed: dict[int, RunFiles]) -> str:
    values = [v for run in by_seed.values() if run.status == "completed" and (v := run.final()) is not None]
    label = next(iter(by_seed.values())).label
    name = " ".join(override for override in label.split() if not override.startswith("runtime.seed=")) or "default"
    metric = next((run.metric for run in by_seed.values() if run.metric), None)
    if len(values) < 2 or metric is None:
        return f"{name}: {len(values)} of {len(by_seed)} seeds completed"
    return f"{name}: {metric[0]} {statistics.mean(values):.4f} ± {deviation(values):.4f} over {len(values)} seeds"


def _verdict(runs: Sequence[RunFiles], base: Sequence[RunFiles], seeds: Sequence[int]) -> str:
    metric = base[0].metric
    assert metric is not None
    name, higher_is_better = metric
    trained = [[quality.trained_run(run, seed) for run, seed in zip(arm, seeds, strict=True)] for arm in (runs, base)]
    found = noninferiority.verdict(trained[0], trained[1], Selection(name, max if higher_is_better else min))
    return f"{found.outcome} against the first: {found.reason}"
