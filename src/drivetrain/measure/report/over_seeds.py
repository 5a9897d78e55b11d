"""What several seeds of a config say together: the spread of its metric, its verdict, and when it was at a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from drivetrain.core.selection import Selection
from drivetrain.core.target import Reach
from drivetrain.core.typed import fits
from drivetrain.measure.benchmark import noninferiority, quality
from drivetrain.measure.intervals import deviation
from drivetrain.run.reader import RunFiles

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
