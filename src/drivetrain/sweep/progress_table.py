"""Where a sweep stands: one live table in a terminal, a line for each job elsewhere. No thread redraws it: jobs are forked."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.sweep.store import LENGTH, Entry
from drivetrain.ui import terminal

TAIL = 4096  # bytes of a metrics.jsonl that hold its last records
ROOM = 8  # lines of the screen that the table leaves


def progress(entry: Entry) -> tuple[dict[str, Any], int | None]:
    """A job's last training record ({} before the first), and how many updates it will make, where that is known yet."""
    try:
        length = int((entry.run_dir / LENGTH).read_text())
    except (OSError, ValueError):
        length = None
    for line in reversed(_tail(entry.run_dir / "metrics.jsonl").splitlines()):
        try:
            record = json.loads(line)
            if record["event"] == "train":
                return record, length
        except (ValueError, KeyError):  # cut off at either end
            continue
    return {}, length


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def share(entry: Entry) -> float:
    """How much of its updates a job has made."""
    record, length = progress(entry)
    return min(1.0, record["update"] / length) if record and length else 0.0


def duration(seconds: float) -> str:
    """In few characters."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Board:
    """Tells of the jobs as they begin and end. The base does so in lines."""

    def __init__(self, total: int, heard: bool = False, quiet: bool = False) -> None:
        self.total, self.quiet = total, quiet
        self.heard = heard  # the jobs speak for themselves, between the lines
        self._done = self._ended = 0
        self._work = 0.0  # in jobs: what was done while this looked on
        self._clock = time.monotonic()

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keep(self, entries: Sequence[Entry]) -> None:
        """These came to their ends before."""
        self._done += len(entries)
        if entries:
            print(f"{len(entries)} of {self.total} jobs are done already", flush=True)

    def begin(self, entry: Entry) -> None:
        """A job begins, or is found under way."""
        entry.began, entry.before = time.monotonic(), share(entry)
        if self.heard and not self.quiet:
            print(f"\n{self._name(entry)}", flush=True)

    def end(self, entry: Entry, running: Sequence[Entry]) -> None:
        """A job has ended, while these run on."""
        self._count(entry)
        assert entry.result is not None
        left = self.left(running)
        after = f", about {duration(left)} left" if left else ""
        took = f" in {duration(entry.seconds())}" if entry.began else ""
        print(f"{self._name(entry)} {entry.result.status}{took}{after}", flush=True)
        if entry.result.error and not (self.heard and entry.began):
            terminal.say(f"job {entry.number}: {entry.result.error}")

    def refresh(self, entries: Sequence[Entry], running: Sequence[Entry]) -> None:
        """Time has passed."""

    def left(self, running: Sequence[Entry]) -> float | None:
        """Seconds until all is done, at the pace so far; None where there is none to tell from."""
        part = sum(max(0.0, share(e) - e.before) for e in running)
        work = self._work + part
        return (time.monotonic() - self._clock) / work * max(0.0, self.total - self._done - part) if work else None

    def _count(self, entry: Entry) -> None:
        self._done += 1
        self._work += 1 - entry.before if entry.began else 0

    def _name(self, entry: Entry) -> str:
        return f"job {entry.number} of {self.total}: {entry.job.label or 'the only one'}"


class LiveBoard(Board):
    """One table that stays in its place: all jobs where they fit on the screen, else those that run."""

    def __enter__(self) -> LiveBoard:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        # Drawn only when told to, and the streams left alone: the jobs are forked with them.
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def keep(self, entries: Sequence[Entry]) -> None:
        self._done += len(entries)

    def end(self, entry: Entry, running: Sequence[Entry]) -> None:
        self._count(entry)

    def refresh(self, entries: Sequence[Entry], running: Sequence[Entry]) -> None:
        self._live.update(self.table(entries, running, self._console.height - ROOM), refresh=True)

    def table(self, entries: Sequence[Entry], running: Sequence[Entry], room: int) -> Any:
        """The table, of at most `room` jobs."""
        from rich.table import Table
        from rich.text import Text

        left = self.left(running)
        counts = Counter(e.result.status for e in entries if e.result)
        said = [f"{self._done} of {self.total} done", *(f"{n} {s}" for s, n in counts.items() if s != "completed")]
        said += [f"about {duration(left)} left"] if left else []
        table = Table(title=" · ".join(said), title_justify="left", title_style="bold")
        for name in ("job", "overrides", "status", "updates", "loss", "samples/s", "time"):
            table.add_column(name, overflow="ellipsis", no_wrap=True)
        for entry in list(entries) if len(entries) <= room else list(running)[:room]:
            table.add_row(*map(Text, row(entry, entry in running)))
        return table


def row(entry: Entry, runs: bool) -> list[str]:
    """A job's line in the live table."""
    if entry.result is not None:
        r = entry.result
        figures = r.status, f"{r.updates:,}", r.metrics["final"].get("loss"), r.samples_per_second, r.wall_s
    elif runs:
        record, length = progress(entry)
        updates = f"{record.get('update', 0):,}/{length:,}" if length else ""
        status = "running" if length else "starting"
        figures = status, updates, record.get("loss"), record.get("samples_per_second"), entry.seconds()
    else:
        figures = "waiting", "", None, None, 0.0
    status, updates, loss, rate, seconds = figures
    shown = ["" if value is None else terminal.number(value) for value in (loss, rate)]
    return [str(entry.number), entry.job.label, status, updates, *shown, duration(seconds) if seconds else ""]
