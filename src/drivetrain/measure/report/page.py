"""The HTML page of `drivetrain report` for several runs. That of one run is ui/pages/run.py."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from drivetrain.core import tables
from drivetrain.core.selection import Selection
from drivetrain.core.target import Reach
from drivetrain.core.typed import fits, is_number
from drivetrain.measure.benchmark import noninferiority, quality
from drivetrain.measure.intervals import deviation
from drivetrain.run.reader import RunFiles, differing
from drivetrain.ui.pages import charts, classes
from drivetrain.ui.pages import run as run_page
from drivetrain.ui.pages.charts import Curve
from drivetrain.ui.sheet import Part, Section, Sheet, Table, folded, joined, remarks, under, words

ENDED = ("completed", "failed", "diverged")  # the statuses of runs that ended by themselves
Target = float | Reach | None  # a number is of the runs' own metric


def seconds_to(run: RunFiles, target: float | Reach) -> float:
    """When a run reached a target; endlessly late where it did not."""
    return reached[0] if (reached := run.to_target(target)) else math.inf


def summarize_seeds(runs: Sequence[RunFiles], target: Target = None) -> list[str]:
    """A line for each config that was run with several seeds: its metric's mean and spread, and the verdict on its quality.

    The verdict is against the first such config on the same data and loss, the oldest, seed by seed. Runs that were stopped
    are left out. With a `target` each line says how many seeds reached it, and the fastest comes first.
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
    if target is None:
        return lines
    medians = [_median_to(list(by_seed.values()), target) for by_seed in configs]
    lines = [f"{line}; {_arrivals(by_seed, target)}" for line, by_seed in zip(lines, configs, strict=True)]
    return [line for _, line in sorted(zip(medians, lines, strict=True), key=lambda found: found[0])]


def _median_to(runs: Sequence[RunFiles], target: float | Reach) -> float:
    """The median of the seconds to a target, to which a run that did not reach it counts as endlessly many."""
    return statistics.median(seconds_to(run, target) for run in runs)


def _arrivals(by_seed: dict[int, RunFiles], target: float | Reach) -> str:
    """How many seeds reached a target, and when the middle one did."""
    runs = list(by_seed.values())
    reached = sum(run.to_target(target) is not None for run in runs)
    median = _median_to(runs, target)
    when = f", after {median:.1f} s (median)" if math.isfinite(median) else ""
    return f"{target if isinstance(target, Reach) else f'{target:.4g}'} reached by {reached} of {len(runs)} seeds{when}"


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


MAX_CURVES = 60  # runs with curves
MOST_TABLES = 6  # runs whose confusion matrices are shown; those of more are in their result.json
MOST_KNOBS = 12  # knobs that are drawn
OVER = ("updates", "samples", "seconds")


def sheet_of(
    runs: Sequence[RunFiles], found: Table, verdict: str, target: Target, seeds: Sequence[str], ranked: bool = False
) -> Sheet:
    """The answer, the table, the metric over each knob, and curves.

    `ranked`: the runs stand by their time to the target.
    """
    drawn = _best(runs, MAX_CURVES)
    shown = [f"Curves are those of the best {MAX_CURVES}."] if len(runs) > MAX_CURVES else []
    if not seeds and len(runs) > 1:
        shown.append("Each config ran with one seed. Several, as in runtime.seed=0,1,2, tell whether a difference is chance.")
    differing_table, same = found.differing(always=3)
    shown += [f"The same for all: {', '.join(f'{name} {cell}' for name, cell in same)}."] if same else []
    body: list[Section] = under("The metric over each setting", Part(charts.grid(knobs))) if (knobs := _knobs(runs)) else []
    names = {id(each): row[0] for each, row in zip(runs, found.texts(), strict=True)}
    body += _curves(drawn, names)
    for each in [r for r in drawn if r.result and r.result.tables][:MOST_TABLES]:
        assert each.result is not None
        of_what, tables_found = tables.of_result(each.result.tables)
        title = f"Classes of {names[id(each)]}"
        body.append(folded(title, classes.sections(tables_found, f"{names[id(each)]}, {of_what}", 3)))
    commands = [(names[id(each)], f"drivetrain train {shlex.join(run_page.overrides_of(each))}".strip()) for each in drawn]
    again = Table(("run", "command"), commands, "Commands", ("command",))
    body += under("How to reproduce them", folded("The command of each run", [again], len(runs) < 8))
    body += under("Where they ran", *_environments(runs, names))
    over = under("Over seeds", words(*seeds)) if seeds else []
    first = [_table(runs, differing_table, target, ranked), remarks(*shown), *over]
    return Sheet("Runs compared – drivetrain report", verdict, [*first, Part(joined(body))])


def _winner(runs: Sequence[RunFiles], target: Target, ranked: bool) -> int | None:
    """The number of the run that is highlighted: the first at the target, or else the best by the metric that all share."""
    if ranked and target is not None:
        return 0 if runs[0].to_target(target) is not None else None
    best = _best(runs, 1)[0]
    return runs.index(best) if best.best() is not None and len({r.metric for r in runs if r.metric}) == 1 else None


def _table(runs: Sequence[RunFiles], found: Table, target: Target, ranked: bool) -> Table:
    """The table, with the best run highlighted, and bars of speed and memory."""
    of: dict[str, Callable[[RunFiles], float | None]] = {
        "samples/s": lambda r: r.result.samples_per_second if r.result else None,
        "peak memory": lambda r: r.result.peak_memory_bytes if r.result else None,
        "run time": lambda r: r.result.wall_s if r.result else None,
    }
    if target is not None:
        of |= {name: lambda r: (r.to_target(target) or (None,))[0] for name in found.header if name.startswith("time to ")}
    bars = {name: [_finite(value(r)) for r in runs] for name, value in of.items()}
    winner = _winner(runs, target, ranked)
    return replace(found, name="The runs", prose=("error", "folder"), sortable=True, winner=winner, bars=bars)


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


def _curves(runs: Sequence[RunFiles], names: dict[int, str]) -> list[Section]:
    """Loss and metric of the runs; the reader chooses over what."""
    metric = next((each.metric[0] for each in runs if each.metric), None)
    drawn: list[str] = []
    for n, over in enumerate(OVER):
        losses = [Curve(names[id(r)], run_page.points(r.train, over, "loss")) for r in runs]
        log = charts.spans_decades([y for curve in losses for _, y in curve.points])
        title = "Training loss" + (" (logarithmic axis)" if log else "")
        drawn.append(charts.curves(title, losses, over, log, kind=f"over{n}"))
        if metric is not None:
            of_set = next(each.evaluated.set for each in runs if each.metric)
            judged = [Curve(names[id(r)], run_page.points(r.evaluated, over, metric)) for r in runs]
            drawn.append(charts.curves(f"{metric.capitalize()}, {of_set} set", judged, over, kind=f"over{n}"))
    return run_page.switched("How they went", OVER, drawn)


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
