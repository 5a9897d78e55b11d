"""`drivetrain.runs`: runs as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.core.paths import expanded
from drivetrain.run.curves import need_pandas
from drivetrain.run.reader import RunFiles, differing, find

TIMES = ("samples_per_second", "step_ms_p50", "step_ms_p95", "data_wait_fraction", "mfu", "peak_memory_bytes", "wall_s")


def as_frame(folder: Path | str) -> Any:
    """The runs in a folder and below, the oldest first: a row for each, with its settings, metrics and times.

    Settings are those in which the runs differ. Metrics are `<set>.final.<name>` and `<set>.best.<name>`, such as
    `validation.best.accuracy` and `test.best.accuracy`. Raises UserError where there is no run, or no pandas.
    """
    pandas = need_pandas("drivetrain.runs")
    runs = find([expanded(folder)])
    settings = differing(runs)
    return pandas.DataFrame([dict(_row(run, settings)) for run in runs])


def _row(run: RunFiles, settings: list[str]) -> Iterator[tuple[str, Any]]:
    yield "run", str(run.path)
    yield "status", run.status
    yield "overrides", run.label
    for key in settings:
        value = run.config.get(key)
        yield key, tuple(value) if isinstance(value, list) else value  # a tuple can be grouped by
    result = run.result
    for of_set, evaluations in (result.metrics if result is not None else {}).items():
        for when, metrics in evaluations.items():
            for name, value in metrics.items():
                yield f"{of_set}.{when}.{name}", value
    if result is None and run.evaluated.values:  # still running, or killed
        for name, value in run.evaluated.values[-1].items():
            yield f"{run.evaluated.set}.final.{name}", value
    yield "updates", result.updates if result is not None else run.train.updates[-1] if run.train.updates else 0
    for name in TIMES:
        yield name, getattr(result, name) if result is not None else None
    yield "error", result.error if result is not None else None
