"""The HTML page of `drivetrain report`."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from typing import Any

from drivetrain.measure.html import page, paragraphs, plot, table
from drivetrain.measure.report import tables
from drivetrain.run.reader import RunFiles, differing

# Plotly highlights the active button in white in any colour scheme, so that its text must be dark.
BUTTON: dict[str, Any] = {"bgcolor": "#d9d9e0", "bordercolor": "#8b8d98", "font": {"color": "#1c2024"}}
MAX_CURVES, MAX_POINTS, MAX_BARS = 60, 200, 60  # runs with curves, points of each, runs with bars


def report_page(
    runs: Sequence[RunFiles], header: Sequence[str], rows: Sequence[Sequence[str]], target: float | None, seeds: Sequence[str]
) -> str:
    """One file: the table, curves against updates, samples and time, bars, and the keys in which the runs differ."""
    completed = sum(run.status == "completed" for run in runs)
    drawn = _best(runs, MAX_CURVES)
    shown = f" Curves and bars show the best {MAX_CURVES} of them." if len(runs) > MAX_CURVES else ""
    numbers = {id(run): str(n) for n, run in enumerate(runs)}
    counted = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    body = [
        f'<p class="soft">{counted}, {completed} completed.{shown} A click on a column\'s header sorts the table.</p>',
        table(header, rows, ("error",), sortable=True),
    ]
    if seeds:
        body += ["<h2>Over seeds</h2>", *paragraphs(seeds)]
    figures: dict[str, Any] = {}
    for name, (title, figure, note, height) in _figures(runs, drawn, numbers, target).items():
        if figure is not None:
            figures[name] = figure
            body += [f"<h2>{html.escape(title)}</h2>", f'<p class="soft">{html.escape(note)}</p>', plot(name, height)]
    matrices, heatmaps = tables.sections(drawn, numbers)
    body, figures = [*body, *matrices], {**figures, **heatmaps}
    if keys := differing(runs):
        cells = [[numbers[id(run)], *(str(run.config.get(key, "–")) for key in keys)] for run in drawn]
        body += ["<h2>Differences of the configs</h2>", table(["run", *keys], cells)]
    commands = [(numbers[id(run)], _command(run)) for run in drawn]
    body += ["<h2>To run one again</h2>", table(("run", "command"), commands, ("command",))]
    body += ["<h2>Where they ran</h2>", *_environments(runs, numbers)]
    return page("Runs", body, figures)


def _figures(
    runs: Sequence[RunFiles], drawn: Sequence[RunFiles], numbers: dict[int, str], target: float | None
) -> dict[str, tuple[str, dict[str, Any] | None, str, int]]:
    """By id: a figure's title, the figure (None where no run has data for it), a note, and its height in pixels."""
    metric = next((run.metric[0] for run in runs if run.metric), None)
    tall = 90 + 24 * min(len(drawn), MAX_BARS)
    figures = {"loss": ("Training loss", _curves(drawn, numbers, "train", "loss", log=True), "", 380)}
    if metric:
        figures["metric"] = (f"Test {metric}", _curves(drawn, numbers, "evaluated", metric), "", 380)
    speed = _bars(drawn, numbers, _speed, _spread)
    figures["speed"] = ("Samples a second", speed, "The bar's whisker: 10th to 90th percentile.", tall)
    memory = _bars(drawn, numbers, lambda run: run.result and _gib(run.result.peak_memory_bytes))
    figures["memory"] = ("Peak memory, GiB", memory, "", tall)
    if target is not None:
        seconds = _bars(drawn, numbers, lambda run: (run.to_target(target) or (None,))[0])
        note = "Since the run's first record; a run without a bar has not reached it."
        figures["target"] = (f"Seconds to {metric} {target:.4g}", seconds, note, tall)
    note = "A line is a run: drag along an axis to select some."
    figures["parallel"] = ("Parallel coordinates", _parallel(runs, metric), note, 420)
    return figures


def _best(runs: Sequence[RunFiles], most: int) -> list[RunFiles]:
    """The `most` best runs by their metric, in the order in which they were started."""
    if len(runs) <= most:
        return list(runs)

    def rank(n: int) -> tuple[bool, float]:
        value, metric = runs[n].best(), runs[n].metric
        return (value is None, 0.0 if value is None or metric is None else -value if metric[1] else value)

    return [runs[n] for n in sorted(sorted(range(len(runs)), key=rank)[:most])]


def _curves(runs: Sequence[RunFiles], numbers: dict[int, str], which: str, name: str, log: bool = False) -> dict[str, Any] | None:
    """A line for each run; buttons choose the x axis."""
    lines, xs = [], {"updates": [], "samples": [], "seconds": []}  # type: ignore[var-annotated]
    for run in runs:
        points = getattr(run, which)
        every = max(1, len(points.updates) // MAX_POINTS)
        y = points.curve(name)[::every]
        if not any(v is not None for v in y):
            continue
        for axis, collected in xs.items():
            collected.append(getattr(points, axis)[::every])
        label = f"{numbers[id(run)]}: {run.label}"
        lines.append({"type": "scatter", "mode": "lines", "name": label[:60], "x": xs["updates"][-1], "y": y})
    if not lines:
        return None
    buttons = [
        {"label": axis, "method": "update", "args": [{"x": collected}, {"xaxis.title.text": axis}]}
        for axis, collected in xs.items()
    ]
    return {
        "data": lines,
        "layout": {
            "margin": {"t": 40, "r": 10}, "xaxis": {"title": {"text": "updates"}}, "yaxis": {"type": "log" if log else "linear"},
            "showlegend": len(lines) <= 12, "legend": {"orientation": "h", "y": -0.25},
            "updatemenus": [
                {"type": "buttons", "direction": "left", "x": 0, "y": 1.18, "xanchor": "left", "buttons": buttons, **BUTTON}
            ],
        },
    }  # fmt: skip


def _bars(runs: Sequence[RunFiles], numbers: dict[int, str], value: Any, spread: Any = None) -> dict[str, Any] | None:
    found = [(run, v) for run in reversed(runs) if (v := value(run)) is not None]
    if not found:
        return None
    bar: dict[str, Any] = {
        "type": "bar", "orientation": "h", "x": [v for _, v in found], "marker": {"color": "#3e63dd"},
        "y": [f"{numbers[id(run)]}: {run.label}"[:44] for run, _ in found],
    }  # fmt: skip
    if spread is not None:
        around = [spread(run, v) for run, v in found]
        bar["error_x"] = {
            "type": "data", "symmetric": False, "array": [a for _, a in around], "arrayminus": [b for b, _ in around],
            "color": "#8b8d98",
        }  # fmt: skip
    return {"data": [bar], "layout": {"margin": {"t": 10, "r": 10}, "yaxis": {"type": "category"}, "xaxis": {}}}


def _speed(run: RunFiles) -> float | None:
    return run.result.samples_per_second if run.result else None


def _spread(run: RunFiles, value: float) -> tuple[float, float]:
    rates = run.rates()
    if not rates:
        return 0.0, 0.0
    return max(0.0, value - rates[len(rates) // 10]), max(0.0, rates[len(rates) * 9 // 10] - value)


def _gib(count: int | None) -> float | None:
    return count / 2**30 if count else None


def _parallel(runs: Sequence[RunFiles], metric: str | None) -> dict[str, Any] | None:
    """Parallel coordinates: the keys that differ, then the speed and the metric."""
    keys = differing(runs)
    done = [run for run in runs if run.result and run.final() is not None and run.config]
    if len(done) < 3 or not keys or metric is None:
        return None
    axes = [_axis(key, [run.config.get(key) for run in done]) for key in keys[:8]]
    axes.append({"label": "samples/s", "values": [run.result.samples_per_second or 0 for run in done if run.result]})
    values = [run.final() for run in done]
    axes.append({"label": metric, "values": values})
    line = {"color": values, "colorscale": [[0, "#8b8d98"], [1, "#3e63dd"]], "showscale": True}
    return {"data": [{"type": "parcoords", "dimensions": axes, "line": line}], "layout": {"margin": {"t": 50, "b": 20}}}


def _axis(key: str, values: list[Any]) -> dict[str, Any]:
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return {"label": key, "values": values}
    names = sorted({str(v) for v in values})
    return {
        "label": key, "values": [names.index(str(v)) for v in values], "tickvals": list(range(len(names))), "ticktext": names,
    }  # fmt: skip


def _command(run: RunFiles) -> str:
    overrides = run.result.overrides if run.result else run.environment.get("overrides", [])
    return f"drivetrain train {shlex.join(overrides)}".strip()


def _environments(runs: Sequence[RunFiles], numbers: dict[int, str]) -> list[str]:
    """Each environment once, with the runs in it."""
    facts: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        about = run.environment
        rows = [(k, str(about[k])) for k in ("drivetrain", "python", "platform", "processor", "git_commit") if k in about]
        rows += [(k, str(v)) for k, v in about.get("versions", {}).items()]
        facts.setdefault(tuple(rows), []).append(numbers[id(run)])
    return [
        f"<p>Runs {html.escape(', '.join(names[:20]))}{' …' if len(names) > 20 else ''}</p>" + table(("", ""), rows, ("",))
        for rows, names in facts.items()
        if rows
    ]
