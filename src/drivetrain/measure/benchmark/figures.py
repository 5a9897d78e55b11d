"""The place of the figure of a program's run: its output, or a file that it writes."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drivetrain.core.machine import files

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OF_FILE = re.compile(r"[^:]+\.(?:jsonl?|csv):[^:]+")
Pick = Literal["last", "first", "best"]


class Unmeasured(Exception):
    """A run has no figure; the message is the reason."""


@dataclass(frozen=True)
class FigureSource:
    """The place of a run's figure: a pattern of its output, or FILE.json:key, FILE.jsonl:key or FILE.csv:column."""

    given: str
    higher: bool
    pick: Pick = "last"  # if there are several values

    @property
    def name(self) -> str:
        """Its name in tables: the key, or the first word of the pattern."""
        if OF_FILE.fullmatch(self.given):
            return re.split("[:.]", self.given)[-1]
        return next(iter(re.findall(r"[A-Za-z]\w*", self.given)), self.given)

    def problems(self, option: str) -> Iterator[str]:
        """Yield its problems."""
        if OF_FILE.fullmatch(self.given):
            return
        try:
            pattern = re.compile(self.given)
        except re.error as error:
            yield f"{option} {self.given!r} is no regular expression: {error}"
            return
        if pattern.groups != 1:
            yield f"{option} {self.given!r} has {pattern.groups} groups: put round brackets around the number alone"

    def read(self, output: str, cwd: Path, out: Path, began: float) -> tuple[float, int]:
        """The value in a run's output or file, and the number of values. Raises Unmeasured."""
        values = list(self._of_file(cwd, out, began) if OF_FILE.fullmatch(self.given) else self._of_output(output))
        value = {"last": values[-1], "first": values[0], "best": (max if self.higher else min)(values)}[self.pick]
        if not math.isfinite(value):
            raise Unmeasured(f"{self.name} is {value}")
        return value, len(values)

    def _of_output(self, output: str) -> list[float]:
        lines = lines_of(output)
        found = [text for line in lines for text in re.findall(self.given, line)]
        if not found:
            raise Unmeasured(f"no line of its output matches {self.given!r}; the last ones: {' | '.join(last_of(lines))}")
        try:
            return [float(text) for text in found]
        except ValueError:
            raise Unmeasured(f"{self.given!r} finds {found[-1]!r} in its output, which is no number") from None

    def _of_file(self, cwd: Path, out: Path, began: float) -> Iterator[float]:
        name, _, key = self.given.replace("{out}", str(out)).rpartition(":")
        found = [Path(place) for place in glob.glob(str(cwd / name))]
        if len(found) != 1:
            raise Unmeasured(f"it left {len(found) or 'no'} {name}{'' if found else f' (looked in {cwd})'}")
        if found[0].stat().st_mtime < began:
            raise Unmeasured(f"{name} is older than the run: the program did not write it")
        rows = list(_rows(found[0]))
        values = [value for row in rows for value in _numbers(row, key)]
        if not values:
            known = rows[-1] if rows and isinstance(rows[-1], Mapping) else {}
            raise Unmeasured(f"{name} has no number at {key}; it has {', '.join(map(str, [*known][:12])) or 'no keys'}")
        yield from values


def lines_of(output: str) -> list[str]:
    """The lines that a program printed, without colours; each redrawing of a progress bar is a line."""
    return [line for line in re.split(r"[\r\n]+", ESCAPES.sub("", output)) if line.strip()]


def last_of(lines: Sequence[str]) -> list[str]:
    """The last lines, long ones cut."""
    return [line.strip()[:120] for line in lines[-3:]] or ["it printed nothing"]


def _rows(file: Path) -> Iterator[object]:
    """The rows of a file of figures. Raises Unmeasured."""
    import csv

    text = files.read_text(file)
    try:
        if file.suffix == ".csv":
            yield from csv.DictReader(text.splitlines())
        elif file.suffix == ".jsonl":
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
        else:
            yield json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unmeasured(f"{file} cannot be read: {error}") from None


def _numbers(row: object, key: str) -> list[float]:
    """The numbers at a key such as eval.accuracy or history[-1].loss; for a list, the numbers of all rows with the key."""
    found: list[object] = [row]
    for part in [key] if isinstance(row, Mapping) and key in row else re.findall(r"[^.\[\]]+", key):
        inner: list[object] = []
        for value in found:
            if isinstance(value, Mapping) and part in value:
                inner.append(value[part])
            elif isinstance(value, list) and re.fullmatch(r"-?\d+", part) and -len(value) <= int(part) < len(value):
                inner.append(value[int(part)])
            elif isinstance(value, list):
                inner += [each[part] for each in value if isinstance(each, Mapping) and part in each]
        found = inner
    numbers = []
    for value in found:
        with suppress(TypeError, ValueError):  # an empty cell, a text
            numbers += [] if isinstance(value, bool) else [float(str(value))]
    return numbers
