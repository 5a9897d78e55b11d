"""The HTML page of `drivetrain report` for several runs. That of one run is ui/pages/run.py."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from drivetrain.core import tables
from drivetrain.core.typed import is_number
from drivetrain.run.reader import RunFiles, differing
from drivetrain.ui.pages import blocks, charts, classes, run
from drivetrain.ui.pages.charts import Curve
from drivetrain.ui.sheet import Table

if TYPE_CHECKING:
    from drivetrain.measure.report.over_seeds import Target
    from drivetrain.measure.report.report import Table as RunTable

MAX_CURVES = 60  # runs with curves
MOST_TABLES = 6  # runs whose confusion matrices are shown; those of more are in their result.json
MOST_KNOBS = 12  # knobs that are drawn
OVER = ("updates", "samples", "seconds")


def report_page(
    runs: Sequence[RunFiles], found: RunTable, verdict: str, target: Target, seeds: Sequence[str], ranked: bool = False
) -> str:
    """One file: the answer, the table, the metric over each knob, and curves.

    `ranked`: the runs stand by their time to the target.
    """
    drawn = _best(runs, MAX_CURVES)
    shown = [f"Curves are those of the best {MAX_CURVES}."] if len(runs) > MAX_CURVES else []
    if not seeds and len(runs) > 1:
        shown.append("Each config ran with one seed. Several, as in runtime.seed=0,1,2, tell whether a difference is chance.")
    differing_table, same = Table(found.header, found.rows).differing(always=3)
    header, rows = differing_table.header, differing_table.texts()
    body = [_table(runs, header, rows, target, ranked), *blocks.paragraphs(shown, soft=True)]
    body += blocks.paragraphs([f"The same for all: {', '.join(f'{name} {cell}' for name, cell in same)}."] if same else [], True)
    if seeds:
        body += [blocks.heading("Over seeds"), *blocks.paragraphs(seeds)]
    if knobs := _knobs(runs):
        body += [blocks.heading("The metric over each knob"), charts.grid(knobs)]
    names = {id(each): name for each, name in zip(runs, found.names, strict=True)}
    body += _curves(drawn, names)
    for each in [r for r in drawn if r.result and r.result.tables][:MOST_TABLES]:
        assert each.result is not None
        of_what, tables_found = tables.of_result(each.result.tables)
        title = f"Classes of {names[id(each)]}"
        body.append(blocks.folded(title, classes.sections(tables_found, f"{names[id(each)]}, {of_what}", 3)))
    commands = [(names[id(each)], f"drivetrain train {shlex.join(run.overrides_of(each))}".strip()) for each in drawn]
    again = blocks.table(("run", "command"), commands, ("command",), name="Commands")
    body += [blocks.heading("How to reproduce them"), blocks.folded("The command of each run", [again], len(runs) < 8)]
    body += [blocks.heading("Where they ran"), *_environments(runs, names)]
    return blocks.page("Runs compared – drivetrain report", verdict, body)


def _winner(runs: Sequence[RunFiles], target: Target, ranked: bool) -> int | None:
    """The number of the run that is highlighted: the first at the target, or else the best by the metric that all share."""
    if ranked and target is not None:
        return 0 if runs[0].to_target(target) is not None else None
    best = _best(runs, 1)[0]
    return runs.index(best) if best.best() is not None and len({r.metric for r in runs if r.metric}) == 1 else None


def _table(runs: Sequence[RunFiles], header: Sequence[str], rows: Sequence[Sequence[str]], target: Target, ranked: bool) -> str:
    """The table, with the best run highlighted, and bars of speed and memory."""
    winner = _winner(runs, target, ranked)
    of: dict[str, Callable[[RunFiles], float | None]] = {
        "samples/s": lambda r: r.result.samples_per_second if r.result else None,
        "peak memory": lambda r: r.result.peak_memory_bytes if r.result else None,
        "run time": lambda r: r.result.wall_s if r.result else None,
    }
    if target is not None:
        of[next((name for name in header if name.startswith("time to ")), "")] = lambda r: (r.to_target(target) or (None,))[0]
    bars = {name: [_finite(value(r)) for r in runs] for name, value in of.items() if name in header}
    return blocks.table(header, rows, ("error", "folder"), True, winner, bars, "The runs")


def _finite(value: float | None) -> float | None:
    return value if value is not None and 0 < value < charts.LARGEST else None


def _best(runs: Sequence[RunFiles], most: int) -> list[RunFiles]:
    """The `most` best runs by their metric, in the order in which they were started."""
    if len(runs) <= most:
        return list(runs)

    def rank(n: int) -> tuple[bool, float]:
        value, metric = runs[n].best(), runs[n].metric
        missing = value is None or metric is None or value != value
        return (missing, 0.0 if missing or value is None or metric is None else -value if metric[1] else value)

    return [runs[n] for n in sorted(sorted(range(len(runs)), key=rank)[:most])]


def _curves(runs: Sequence[RunFiles], names: dict[int, str]) -> list[str]:
    """Loss and metric of the runs; the reader chooses over what."""
    metric = next((each.metric[0] for each in runs if each.metric), None)
    drawn: list[str] = []
    for n, over in enumerate(OVER):
        losses = [Curve(names[id(r)], run.points(r.train, over, "loss")) for r in runs]
        log = charts.spans_decades([y for curve in losses for _, y in curve.points])
        title = "Training loss" + (" (logarithmic axis)" if log else "")
        drawn.append(charts.curves(title, losses, over, log, kind=f"over{n}"))
        if metric is not None:
            of_set = next(each.evaluated.set for each in runs if each.metric)
            judged = [Curve(names[id(r)], run.points(r.evaluated, over, metric)) for r in runs]
            drawn.append(charts.curves(f"{metric.capitalize()}, {of_set} set", judged, over, kind=f"over{n}"))
    return [blocks.heading("How they went"), run.switched(OVER, drawn)] if any(drawn) else []


def _knobs(runs: Sequence[RunFiles]) -> list[str]:
    """The best value of the metric over each knob of numbers in which at least three runs differ."""
    metric = next((each.metric[0] for each in runs if each.metric), None)
    found = []
    for key in differing(runs)[:MOST_KNOBS] if metric is not None else ():
        points = [(each.config.get(key), each.best()) for each in runs]
        numbers = [(float(x), y) for x, y in points if x is not None and is_number(x) and y is not None]
        values = {x for x, _ in numbers}
        if len(values) >= 3 and len(numbers) == sum(y is not None for _, y in points):
            log = charts.spans_decades(list(values))
            title = f"Best {metric} over {key}" + (" (logarithmic axis)" if log else "")
            found.append(charts.curves(title, [Curve("runs", sorted(numbers))], key, log_x=log, dots=True))
    return found


def _environments(runs: Sequence[RunFiles], names: dict[int, str]) -> list[str]:
    """Each environment once, with the runs in it."""
    found: dict[str, list[str]] = {}
    for each in runs:
        found.setdefault(run.environment(each), []).append(names[id(each)])
    if len(found) == 1:
        return list(found)
    return [
        part for table, of in found.items()
        for part in (*blocks.paragraphs([f"{'; '.join(of[:20])}{' …' if len(of) > 20 else ''}:"]), table)
    ]  # fmt: skip
