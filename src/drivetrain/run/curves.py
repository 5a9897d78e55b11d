"""A run's records over its updates, for notebooks: as a pandas DataFrame and as a matplotlib figure."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.selection import Figure
from drivetrain.core.typed import JsonObject
from drivetrain.run import records

COLORS = {"training": "C0", "validation": "C1", "test": "C2"}  # the same in every panel
OF_TRAINING = {"lr": "learning rate", "samples_per_second": "samples/s"}


def history(run_dir: Path | None) -> Any:
    """The records of a run, a row each: of an update with the loss, of an evaluation with its figures. Epochs count from 1.

    Raises UserError where the run left none, or without pandas.
    """
    return need_pandas("history").json_normalize(list(records.with_epochs_from_1(_read(run_dir))))


def need_pandas(wanted_by: str) -> Any:
    """Return pandas. Raises UserError where it is not installed."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise UserError(
            f"{wanted_by} needs the package 'pandas', which is not installed: pip install 'drivetrain[pandas]'"
        ) from None
    return pandas


def _read(run_dir: Path | None) -> list[records.Record]:
    found = records.read(run_dir / "metrics.jsonl").records if run_dir is not None else []
    if not found:
        raise UserError(f"run {run_dir} has no records: logger=[files], the default, writes them to metrics.jsonl")
    return found


def plot(run_dir: Path | None, metric: str) -> Any:
    """The loss of training and evaluation, the metric, the learning rate and the speed over the updates.

    Raises UserError where the run left no records, or without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "plot() needs the package 'matplotlib', which is not installed: pip install 'drivetrain[plots]'"
        ) from None
    panels = {title: curves for title, curves in _panels(_read(run_dir), metric).items() if curves}

    class Picture(Figure):
        """A figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            file = BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    figure = Picture(figsize=(8, 1.2 + 1.7 * len(panels)), layout="constrained")
    for axes, (title, curves) in zip(
        figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels.items(), strict=True
    ):
        for label, points in curves.items():
            axes.plot(
                *zip(*points, strict=True),
                label=label,
                color=COLORS.get(label),
                marker="." if len(points) < 30 else "",
                linewidth=1.6,
            )
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.spines[["right", "top"]].set_visible(False)
        if len(curves) > 1:
            axes.legend(frameon=False)
    figure.get_axes()[-1].set_xlabel("update")
    return figure


def _panels(found: list[records.Record], metric: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Title → curve → points (update, value)."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {"loss": {}, metric: {}, **{t: {} for t in OF_TRAINING.values()}}
    for record in found:
        if record.get("event") == "train":
            for key, title in {"loss": "loss", **OF_TRAINING}.items():
                _add(panels[title], "training" if key == "loss" else title, record, record.get(key))
        elif record.get("event") == "evaluate":
            for key in dict.fromkeys(("loss", metric)):
                for of, name in Figure.parse(key).on_all_sets(record).items():
                    _add(panels[key], f"{record.get('set', 'evaluation')} {of}".rstrip(), record, record[name])
    return panels


def _add(curves: dict[str, list[tuple[int, float]]], name: str, record: JsonObject, value: Any) -> None:
    if isinstance(value, int | float):
        curves.setdefault(name, []).append((record["update"], value))
