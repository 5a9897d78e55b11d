"""Results of runs: names, a table, and one sentence with the outcome of one run or the best of several."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Sequence

from drivetrain.core.options.overrides import key_of
from drivetrain.core.options.selection import Figure, Reach
from drivetrain.core.typed import is_number
from drivetrain.run.reader import RunFiles, differing
from drivetrain.run.result import Result
from drivetrain.ui.sheet import Table, figure, setting
from drivetrain.ui.terminal import duration, number

WIDTH = 100  # characters of a table without a terminal
MAX_ROWS = 40  # in the terminal
SPARE = (  # columns that a narrow table leaves out, in this order
    "folder", "samples/s, middle 80 %", "update, 95th percentile", "updates made", "compiling", "waiting for data", "peak memory",
    "update, median", "run time", "samples/s",
)  # fmt: skip
UNREADABLE = "its result.json is not one of drivetrain's"
Target = float | Reach | None  # a number means the runs' own metric


def said(target: Target) -> str:
    """A target in words."""
    return "target" if target is None else str(target) if isinstance(target, Reach) else f"{target:.4g}"


def time_to(target: Target) -> str:
    """The name of the column of seconds to a target."""
    return f"time to {said(target)}"


def common_target(runs: Sequence[RunFiles]) -> float | None:
    """The metric's value that all completed runs reached: the worst of their best values. None if their metrics differ."""
    found = [(run.best(), run.metric) for run in runs if run.status == "completed" and run.metric]
    values = [value for value, _ in found if value is not None]
    return ((min if found[0][1][1] else max)(values)) if values and len({metric for _, metric in found}) == 1 else None


def named(runs: Sequence[RunFiles], without: Collection[str] = ()) -> list[str]:
    """A name for each run: the overrides that not all runs share, numbered if several runs have the same."""
    words = [[word for word in run.label.split() if key_of(word) not in without] for run in runs]
    common = set(words[0]).intersection(*words[1:]) if len(words) > 1 else set()
    names = [" ".join(word for word in each if word not in common) or "the default" for each in words]
    seen: Counter[str] = Counter()
    for n, name in enumerate(names):
        seen[name] += 1
        names[n] = f"{name} (run {seen[name]})" if names.count(name) + seen[name] > 2 else name
    return names


def table(runs: Sequence[RunFiles], target: Target, ranked: bool = False) -> Table:
    """The table: name, metric, speed, then the keys that differ and the other figures, without empty columns.

    `ranked`: the time to the target follows the name.
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
    settings = sorted(keys, key=lambda name: "." not in name)  # the run's name already shows the settings
    spare = [*SPARE, *([] if ranked else [time_to(target)]), f"{metric} at the end", "error", *settings]
    return Table.of(columns | figures, spare=spare, width=WIDTH, most=MAX_ROWS).used(4)


def _figures(run: RunFiles, target: Target, metric: str) -> dict[str, str]:
    """A run's figures as text, from its result or its records so far."""
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
        **costs(r),
        "samples/s, middle 80 %": f"{rates[len(rates) // 10]:,.0f}–{rates[len(rates) * 9 // 10]:,.0f}" if rates else "–",
        "updates made": str(r.updates if r else run.train.updates[-1] if run.train.updates else 0),
        "folder": str(run.path),
        "error": r.in_short if r else UNREADABLE if run.status == "unreadable" else "",
    }


def costs(result: Result | None) -> dict[str, str]:
    """The costs of a run other than its total time, as text; a dash if unknown."""
    r = result or Result("")
    return {
        "update, median": figure(r.step_ms_p50, "{:.2f} ms"),
        "update, 95th percentile": figure(r.step_ms_p95, "{:.2f} ms"),
        "waiting for data": figure(100 * r.data_wait_fraction if r.data_wait_fraction is not None else None, "{:.1f} %"),
        "peak memory": figure(r.peak_memory_bytes / 2**30 if r.peak_memory_bytes else None, "{:.2f} GiB"),
        "compiling": figure(r.compile_s, "{:.1f} s"),
    }


def verdict(runs: Sequence[RunFiles], target: Target = None) -> str:
    """The outcome of one run, or the best of several, or the first to reach a target."""
    if len(runs) == 1:
        return _of_one(runs[0])
    completed = sum(run.status == "completed" for run in runs)
    of = f"Of {len(runs)} runs" + (f", {completed} completed," if completed < len(runs) else ",")
    if target is not None:
        return f"{of} {_first_at(runs, target)}"
    metrics = {run.metric for run in runs if run.metric}
    placed = sorted((n for n, run in enumerate(runs) if not rank(run)[0]), key=lambda n: rank(runs[n]))
    if not placed:
        return f"{of} none has been evaluated"
    if len(metrics) > 1:
        return f"{of} none is the best: they use different metrics ({', '.join(sorted(metric[0] for metric in metrics))})"
    values, places = [runs[n].best() or 0.0 for n in placed], [rank(runs[n]) for n in placed]
    ((metric, _),), (n, *_), best, worst = metrics, placed, values[0], values[-1]
    equal, ties, of_set = values.count(best), places.count(places[0]), runs[n].evaluated.set
    if equal == len(values) > 1:
        lowest = f", {named(runs)[n] if ties == 1 else f'{ties} of them'} with the lowest loss" if ties < equal else ""
        return f"{of} all reached the same: {metric} {best:.4f} on the {of_set} set{lowest}"
    count = ties if ties > 1 else equal
    others = "has 1 other" if count == 2 else f"have {count - 1} others"
    also = f" (as {others}{'' if ties > 1 else ', with a higher loss'})" if count > 1 else ""
    against = f", and the worst {worst:.4f}" if len(values) > 1 else ""
    return f"{of} {named(runs)[n]} is the best{also}: it reached {metric} {best:.4f} on the {of_set} set{against}"


def rank(run: RunFiles) -> tuple[bool, tuple[float, float]]:
    """The rank of a run, lowest is best; runs without a value come last."""
    place = run.place()
    return place is None, place or (0.0, 0.0)


def _first_at(runs: Sequence[RunFiles], target: float | Reach) -> str:
    """The run that reached a target first, in the rest of a sentence."""
    what = said(target)
    reached = sorted((found[0], n) for n, run in enumerate(runs) if (found := run.to_target(target)) is not None)
    if not reached:
        return f"none reached {what}"
    seconds, n = reached[0]
    others = (
        f"; {len(reached)} of them reached it" if len(reached) < len(runs) else f", and the last after {reached[-1][0]:.1f} s"
    )
    return f"{named(runs)[n]} reached {what} first, after {seconds:.1f} s{others}"


def alone_at(run: RunFiles, target: float | Reach) -> str:
    """The time when a run reached a target, in the rest of a sentence."""
    what = said(target)
    if (reached := run.to_target(target)) is None:
        return f"has not reached {what}"
    seconds, update = reached
    noted = isinstance(target, Reach) and run.noted(target) is not None
    since = "the start of its process" if noted else "its first record"
    return f"reached {what} after {update:,} updates, {seconds:.1f} s after {since}"


def _of_one(run: RunFiles) -> str:
    """The sentence on the training, its length, its result and its end."""
    what = " on ".join(str(run.config[key]) for key in ("model", "data") if key in run.config) or "This run"
    if run.config.get("model") == "timm" and "model.name" in run.config:
        what = what.replace("timm", str(run.config["model.name"]), 1)
    result, updates = run.result, run.train.updates[-1] if run.train.updates else 0
    figures = _judged(run)
    if result is None:
        latest = f", with {figures}" if figures else ""
        ended = {"running": f"is still training, and at update {updates:,}", "killed": f"was killed after update {updates:,}"}
        return f"{what} {ended.get(run.status, f'left a result.json that cannot be read, after update {updates:,}')}{latest}"
    epochs = f"{result.passes} ({result.updates:,} update{'s' * (result.updates != 1)})"
    took = f"{duration(result.wall_s)} with the start"
    length = f"{epochs} in {took}"
    if result.resumed_at:
        length = epochs if result.trained_nothing else f"{epochs}; those since {result.resumed_at:,} took {took}"
    on = f" on {result.world_size} × {result.device}" if result.device and result.world_size > 1 else ""
    if run.status == "completed":
        early = f"the run stopped early: {result.stopped}" if result.stopped else "the run completed"
        return f"{what} reached {figures or 'no figures'} after {length}{on}; {early}"
    reason = f": {result.error.splitlines()[0]}" if result.error else ""
    how = {"diverged": "diverged", "interrupted": "was interrupted", "failed": "failed"}.get(run.status, f"ended as {run.status}")
    return f"{what} {how} after {length}{on}" + (f", with {figures}" if figures else "") + reason


def _judged(run: RunFiles) -> str:
    """The metric that ranks the run's models, on each set: of the best checkpoint if the run kept it, else at the end."""
    name = run.selection.name if run.selection else ((run.result.selection or {}).get("metric", "") if run.result else "")
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
    which = f" ({best_name(run)})" if {when for _, when in found} == {"best"} else ""
    return f"{figure.of_weights} {' and '.join(shown for shown, _ in found)}{which}" if found else ""


def best_name(run: RunFiles) -> str:
    """The name of the best evaluation: a checkpoint only if it was kept."""
    best = run.result.judged("best").get("update") if run.result is not None else None
    kept = run.config.get("saving") == "best" or (run.result is not None and best == run.result.updates)
    return "best checkpoint" if kept else "best evaluation"
