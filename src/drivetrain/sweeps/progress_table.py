"""Shows a sweep's progress: a live table in a terminal, a line for each job elsewhere.

No thread redraws the table, because the process forks the jobs.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.core import files
from drivetrain.run import records
from drivetrain.sweeps.store import LENGTH, Entry
from drivetrain.ui import output, sheet, terminal
from drivetrain.ui.output import echo
from drivetrain.ui.terminal import duration

logger = logging.getLogger(__name__)

TAIL = 4096  # bytes at the end of a metrics.jsonl that hold its last records
RESERVED_LINES = 8  # of the screen, beside the table


def progress(entry: Entry) -> tuple[dict[str, Any], int | None]:
    """A job's last training record ({} before the first), and the number of its updates, None until it is built."""
    try:
        length = int(files.read_text(entry.run_dir / LENGTH))
    except (OSError, ValueError):
        length = None
    return records.last(_tail(entry.run_dir / "metrics.jsonl"), "train") or {}, length


def _tail(path: Path) -> bytes:
    try:
        with files.opened(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read()
    except OSError:
        return b""


def share(entry: Entry) -> float:
    """The share of its updates that a job has made."""
    record, length = progress(entry)
    return min(1.0, record["update"] / length) if record and length else 0.0


class ProgressLines:
    """Prints a line when a job begins and when it ends."""

    def __init__(self, total: int, jobs_print: bool = False, quiet: bool = False) -> None:
        self.total, self.quiet = total, quiet
        self.jobs_print = jobs_print  # the jobs' own output appears between the lines
        self._done = 0  # jobs
        self._work = 0.0  # in jobs: what was done since this process began
        self._clock = time.monotonic()

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keep(self, entries: Sequence[Entry]) -> None:
        """Count jobs that ended before this process began."""
        self._done += len(entries)
        if entries:
            echo(f"{len(entries)} of {self.total} jobs are done already")

    def begin(self, entry: Entry) -> None:
        """A job begins, or was found running."""
        entry.began, entry.before = time.monotonic(), share(entry)
        if self.jobs_print and not self.quiet:
            echo(f"\n{self._name(entry)}")

    def end(self, entry: Entry, running: Sequence[Entry]) -> None:
        """A job has ended; `running` are those that still run."""
        self._count(entry)
        assert entry.result is not None
        seconds_left = self.seconds_left(running)
        after = f", about {duration(seconds_left)} left" if seconds_left else ""
        took = f" in {duration(entry.seconds())}" if entry.began else ""
        echo(f"{self._name(entry)} {entry.result.status}{took}{after}")
        if entry.result.error and not (self.jobs_print and entry.began):
            logger.error("job %d: %s", entry.number, entry.result.error)

    def refresh(self, entries: Sequence[Entry], running: Sequence[Entry]) -> None:
        """Show the progress of the running jobs."""

    def seconds_left(self, running: Sequence[Entry]) -> float | None:
        """Seconds until all jobs are done, at the pace so far; None before any progress."""
        part = sum(max(0.0, share(e) - e.before) for e in running)
        work = self._work + part
        return (time.monotonic() - self._clock) / work * max(0.0, self.total - self._done - part) if work else None

    def _count(self, entry: Entry) -> None:
        self._done += 1
        self._work += 1 - entry.before if entry.began else 0

    def _name(self, entry: Entry) -> str:
        return f"job {entry.number} ({entry.number + 1} of {self.total}): {entry.job.label or 'the only one'}"


class LiveTable(ProgressLines):
    """A table that is redrawn in place: all jobs where they fit on the screen, else those that run."""

    def __enter__(self) -> LiveTable:
        from rich.live import Live

        self._console = output.console()
        # Redrawn only by refresh(), and without redirected streams, which the forked jobs would inherit.
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
        self._live.update(self.table(entries, running, self._console.height - RESERVED_LINES), refresh=True)

    def table(self, entries: Sequence[Entry], running: Sequence[Entry], max_rows: int) -> Any:
        """The table, of at most `max_rows` jobs."""
        from rich.table import Table
        from rich.text import Text

        seconds_left = self.seconds_left(running)
        counts = Counter(e.result.status for e in entries if e.result)
        title = [f"{self._done} of {self.total} done", *(f"{n} {s}" for s, n in counts.items() if s != "completed")]
        title += [f"about {duration(seconds_left)} left"] if seconds_left else []
        table = Table(title=" · ".join(title), title_justify="left", title_style="bold")
        header = ["job", "overrides", "status", "updates", "loss", "samples/s", "time"]
        shown = list(entries) if len(entries) <= max_rows else list(running)[:max_rows]
        rows = [row(entry, entry in running) for entry in shown]
        room = output.console().width if terminal.is_live() else None
        fitting, _ = sheet.Table(header, rows, spare=("samples/s", "time")).fitting(room)
        for name in fitting.header:
            table.add_column(name, overflow="ellipsis", no_wrap=name != "overrides")  # which gives way first, in one line
        for cells in fitting.texts():
            table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
        return table


def row(entry: Entry, runs: bool) -> list[str]:
    """A job's cells in the live table."""
    if entry.result is not None:
        r = entry.result
        figures = r.status, f"{r.updates:,}", r.loss, r.judged_by, r.samples_per_second, r.wall_s
    elif runs:
        record, length = progress(entry)
        updates = f"{record.get('update', 0):,}/{length:,}" if length else ""
        status = "running" if length else "starting"
        figures = status, updates, record.get("loss"), "training", record.get("samples_per_second"), entry.seconds()
    else:
        figures = "waiting", "", None, "", None, 0.0
    status, updates, loss, of_set, rate, seconds = figures
    shown = ["" if loss is None else f"{terminal.number(loss)} {of_set}", "" if rate is None else terminal.number(rate)]
    return [str(entry.number), entry.job.label, status, updates, *shown, duration(seconds) if seconds else ""]
