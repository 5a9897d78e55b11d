"""Reads metrics.jsonl, even with lines damaged by a crash, a full disk or another program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple

from drivetrain.core.errors import UserError
from drivetrain.core.machine import files
from drivetrain.core.options.selection import Figure
from drivetrain.core.typed import JsonObject, is_number

Record = JsonObject
LARGEST = 2**31  # bytes of a metrics.jsonl: ten million records
LONGEST = 2**20  # bytes of a line
MOST_SPOILT, MOST_SPOILT_BYTES = 100_000, 2**26  # broken lines, and their bytes, after which the rest is left out


def with_epochs_from_1(found: Iterable[Record]) -> Iterator[Record]:
    """Yield records, each with its epoch, counted from 1.

    A record's `epoch` is the number of completed epochs; it rises only after the record of an epoch's last update.
    """
    trained: Record = {}  # the last record of training
    for record in found:
        trained = record if record.get("event") == "train" else trained
        epoch = record.get("epoch")
        yield {**record, "epoch": epoch + 1} if isinstance(epoch, int) and trained.get("epoch") == epoch else dict(record)


class Records(NamedTuple):
    """The readable records of a file."""

    records: list[Record]
    unreadable: int  # broken lines; a killed process's partial last line is not counted


def read(path: Path) -> Records:
    """Return the records of a run's metrics.jsonl, none without the file. Each has an integer `update`."""
    found: list[Record] = []
    unreadable = empty = spoilt_bytes = 0
    try:
        with files.opened(path, "rb") as file:
            while (line := file.readline(LONGEST)) and unreadable + empty < MOST_SPOILT and file.tell() <= LARGEST:
                if (record := _record(line)) is not None:
                    found.append(record)
                    continue
                spoilt_bytes += len(line)
                if spoilt_bytes > MOST_SPOILT_BYTES:
                    break
                if not line.strip():
                    empty += 1
                elif line.endswith(b"\n"):
                    unreadable += 1
    except OSError:
        pass
    return Records(found, unreadable)


def last(content: bytes, event: str) -> Record | None:
    """Return the last record of an event in the last bytes of a file."""
    for line in reversed(content.split(b"\n")):
        if (record := _record(line)) is not None and record.get("event") == event:
            return record
    return None


def _record(line: bytes) -> Record | None:
    try:
        record = files.parse_json(line.decode())
    except ValueError:
        return None
    good = isinstance(record, dict) and _is_number(record.get("update"), int)
    return record if good and all(_is_number(record.get(key, 0), int | float) for key in ("time", "samples")) else None


def _is_number(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, kind) and is_number(value)


COLORS = {"training": "C0", "validation": "C1", "test": "C2"}  # the same in every panel
OF_TRAINING = {"lr": "learning rate", "samples_per_second": "samples/s"}


def history(run_dir: Path | None) -> Any:
    """The records of a run, a row each: updates with the loss, evaluations with their figures. Epochs count from 1.

    Raises UserError without records, or without pandas.
    """
    return need_pandas("history").json_normalize(list(with_epochs_from_1(_read(run_dir))))


def need_pandas(wanted_by: str) -> Any:
    """Return pandas. Raises UserError if it is not installed."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise UserError(
            f"{wanted_by} needs the package 'pandas', which is not installed: pip install 'drivetrain[pandas]'"
        ) from None
    return pandas


def _read(run_dir: Path | None) -> list[Record]:
    found = read(run_dir / "metrics.jsonl").records if run_dir is not None else []
    if not found:
        raise UserError(f"run {run_dir} has no records: logger=[files], the default, writes them to metrics.jsonl")
    return found


def plot(run_dir: Path | None, metric: str) -> Any:
    """The loss of training and evaluation, the metric, the learning rate and the speed over the updates.

    Raises UserError without records, or without matplotlib.
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


def _panels(found: list[Record], metric: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
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


def _add(curves: dict[str, list[tuple[int, float]]], name: str, record: JsonObject, value: object) -> None:
    if isinstance(value, int | float):
        curves.setdefault(name, []).append((record["update"], value))
