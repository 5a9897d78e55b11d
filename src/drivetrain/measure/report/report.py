"""`drivetrain report DIR…`: any runs and sweeps as one table, one CSV and one page."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DONE, UserError
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import noninferiority
from drivetrain.measure.intervals import deviation
from drivetrain.run import directory
from drivetrain.run.reader import RunFiles, differing, find
from drivetrain.ui import terminal

JUDGED = ("completed", "failed", "diverged")  # how a run ends of itself
SHOWN = 40  # rows in the terminal


@dataclass
class Settings:
    """What the command itself can be told."""

    target: float | None = None  # of the metric; None: what the worst of the completed runs came to
    out: str | None = None  # a folder; None: a new one under outputs/report


def command(argv: Sequence[str]) -> int:
    """`drivetrain report`; its exit code."""
    asked, rest = arguments.split(argv, Settings)
    if wrong := [word for word in rest if "=" in word and not Path(word).exists()]:
        raise UserError([f"'{word}' is no setting of report, which has target= and out=, nor a folder" for word in wrong])
    runs = find([Path(word).expanduser() for word in rest or ["outputs"]])
    target = asked.target if asked.target is not None else common_target(runs)
    header, rows = table(runs, target)
    terminal.table(*_narrow(header, rows))
    if len(rows) > SHOWN:
        print(f"… and {len(rows) - SHOWN} more, all in the page and the CSV")
    for line in seeds_together(runs):
        print(line)
    from drivetrain.measure.report.page import report_page

    folder = Path(asked.out).expanduser() if asked.out else directory.create(Path("outputs"), "report")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "report.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    (folder / "report.html").write_text(report_page(runs, header, rows, target, seeds_together(runs)))
    print(f"written to {folder}/report.html and report.csv")
    return DONE


def common_target(runs: Sequence[RunFiles]) -> float | None:
    """What all completed runs reached: the worst of their best."""
    found = [(run.best(), run.metric[1]) for run in runs if run.status == "completed" and run.metric]
    values = [value for value, _ in found if value is not None]
    return ((min if found[0][1] else max)(values)) if values else None


def table(runs: Sequence[RunFiles], target: float | None) -> tuple[list[str], list[list[str]]]:
    """Header and rows, as text; a column that no run has anything for is left out."""
    keys = differing(runs)
    metric = next((run.metric[0] for run in runs if run.metric), "metric")
    header = [
        "run", "status", *keys, metric, f"best {metric}", "samples/s", "p10–p90", "step p50", "step p95", "data wait",
        "memory", "compile", f"to {target:.4g}" if target is not None else "to target", "wall", "updates", "folder", "error",
    ]  # fmt: skip
    rows = [[str(n), run.status, *(_word(run.config.get(k)) for k in keys), *_figures(run, target)] for n, run in enumerate(runs)]
    used = [n for n in range(len(header)) if n < 2 or any(row[n] not in ("–", "") for row in rows)]
    return [header[n] for n in used], [[row[n] for n in used] for row in rows]


def _word(value: Any) -> str:
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _figures(run: RunFiles, target: float | None) -> list[str]:
    r, rates = run.result, run.rates()
    reached = run.to_target(target) if target is not None else None

    def text(value: float | None, form: str) -> str:
        return form.format(value) if value is not None else "–"

    return [
        text(run.final(), "{:.4f}"), text(run.best(), "{:.4f}"),
        text(r.samples_per_second if r else statistics.median(rates) if rates else None, "{:,.0f}"),
        f"{rates[len(rates) // 10]:,.0f}–{rates[len(rates) * 9 // 10]:,.0f}" if rates else "–",
        text(r.step_ms_p50 if r else None, "{:.2f} ms"), text(r.step_ms_p95 if r else None, "{:.2f} ms"),
        text(100 * r.data_wait_fraction if r and r.data_wait_fraction is not None else None, "{:.1f} %"),
        text(r.peak_memory_bytes / 2**30 if r and r.peak_memory_bytes else None, "{:.2f} GiB"),
        text(r.compile_s if r else None, "{:.1f} s"), f"{reached[0]:.1f} s" if reached else "–",
        text(r.wall_s if r else run.train.seconds[-1] if run.train.seconds else None, "{:.1f} s"),
        str(r.updates if r else run.train.updates[-1] if run.train.updates else 0), str(run.path),
        ((r.error or "") if r else "").split("\n")[0],
    ]  # fmt: skip


def _narrow(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """What a terminal has room for."""
    out = ("folder", "p10–p90", "step p95", "updates")
    kept = [n for n, name in enumerate(header) if name not in out]
    return [header[n] for n in kept], [[row[n] for n in kept] for row in rows[:SHOWN]]


def seeds_together(runs: Sequence[RunFiles]) -> list[str]:
    """A line for each config that was run with several seeds: its metric's mean and spread, and the verdict on its quality.

    The first of them on the same data, the oldest, is what the others are held against, seed by seed. A run that was stopped
    says nothing.
    """
    groups: dict[str, dict[int, RunFiles]] = {}
    for run in runs:
        if run.config and run.status in JUDGED:
            key = str(sorted((k, str(v)) for k, v in run.config.items() if k != "runtime.seed"))
            group, seed = groups.setdefault(key, {}), int(run.config.get("runtime.seed", 0))
            if run.status == "completed" or seed not in group:
                group[seed] = run
    several = [same for same in groups.values() if len(same) > 1]
    lines = [_spread(same) for same in several]
    for n, same in enumerate(several[1:], 1):
        first = next(other for other in several if _task(other) == _task(same))
        seeds = sorted(same.keys() & first.keys())
        if first is not same and len(seeds) > 1 and first[seeds[0]].metric is not None:
            lines[n] += f"; {_verdict([same[s] for s in seeds], [first[s] for s in seeds], seeds)}"
    return lines


def _task(same: dict[int, RunFiles]) -> str:
    """What the runs were to learn."""
    config = next(iter(same.values())).config
    return str(sorted((k, str(v)) for k, v in config.items() if k.split(".")[0] in ("data", "loss")))


def _spread(same: dict[int, RunFiles]) -> str:
    values = [v for run in same.values() if run.status == "completed" and (v := run.final()) is not None]
    name = " ".join(w for w in next(iter(same.values())).label.split() if not w.startswith("runtime.seed=")) or "default"
    metric = next((run.metric for run in same.values() if run.metric), None)
    if len(values) < 2 or metric is None:
        return f"{name}: {len(values)} of {len(same)} seeds came to an end"
    return f"{name}: {metric[0]} {statistics.mean(values):.4f} ± {deviation(values):.4f} over {len(values)} seeds"


def _verdict(mine: Sequence[RunFiles], base: Sequence[RunFiles], seeds: Sequence[int]) -> str:
    metric = base[0].metric
    assert metric is not None
    arms = [[noninferiority.of_run(run, seed, metric[0]) for run, seed in zip(arm, seeds, strict=True)] for arm in (mine, base)]
    found = noninferiority.verdict(arms[0], arms[1], metric[0], -1.0 if metric[1] else 1.0)
    return f"{found.word} against the first: {found.reason}"
