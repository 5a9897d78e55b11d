"""Reads metrics.jsonl, of which a crash, a full disk or another program may have spoilt lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from drivetrain.core import files
from drivetrain.core.typed import is_number

Record = dict[str, Any]
LARGEST = 2**31  # bytes of a metrics.jsonl: ten million records
LONGEST = 2**20  # bytes of a line
MOST_SPOILT, MOST_SPOILT_BYTES = 100_000, 2**26  # lines that are no record, and their bytes: what follows is left out


def with_epochs_from_1(found: Iterable[Record]) -> Iterator[Record]:
    """Yield records with the epoch that each is of, counted from 1.

    A record's `epoch` is the number of whole epochs, which is one more after the last update of an epoch than in its record.
    """
    trained: Record = {}  # the last record of training
    for record in found:
        trained = record if record.get("event") == "train" else trained
        epoch = record.get("epoch")
        yield {**record, "epoch": epoch + 1} if isinstance(epoch, int) and trained.get("epoch") == epoch else dict(record)


class Records(NamedTuple):
    """What could be read of a file."""

    records: list[Record]
    unreadable: int  # lines that are no record; the last line of a killed process, which is not whole, is not counted


def read(path: Path) -> Records:
    """Return the records of a run's metrics.jsonl, none where there is no such file. Each has a whole number `update`."""
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


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and is_number(value)
