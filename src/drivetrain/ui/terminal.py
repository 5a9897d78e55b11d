"""A run in the terminal: the recipe as a tree, a live progress line and a table of the result; plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.options.selection import handed_on
from drivetrain.core.typed import JsonMapping
from drivetrain.run.result import Result
from drivetrain.ui import logs, output, plots
from drivetrain.ui.output import echo
from drivetrain.ui.sheet import Table

if TYPE_CHECKING:
    import rich.progress

SLOW_RANK = 0.1  # the progress line names the slowest rank if the others wait longer for it than this share of the time
BAR = 12  # characters of the bar
LINE_EVERY_S = 10.0  # between lines of training without an evaluation, without a terminal

logger = logging.getLogger(__name__)


def is_live() -> bool:
    """True if standard output is a terminal that can redraw a line, and `--plain` was not given."""
    return output.can_redraw(sys.stdout)


class PipeSafeStream(io.TextIOWrapper):
    """An output stream that outlives its reader: `drivetrain train | head -1` trains to the end."""

    def write(self, text: str) -> int:
        with self._ignoring_a_closed_pipe():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignoring_a_closed_pipe():
            super().flush()

    @contextlib.contextmanager
    def _ignoring_a_closed_pipe(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # from now on all output is dropped, including the rest of the buffer at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not isinstance(error, BrokenPipeError):
                raise


def prepare_output() -> None:
    """Let standard output and error survive closing, a closed pipe and unencodable characters; show log messages."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as in a daemon
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
        elif stream is getattr(sys, f"__{name}__"):  # not in a test or a notebook
            line_buffering = stream.line_buffering
            setattr(sys, name, PipeSafeStream(stream.detach(), stream.encoding, "replace", line_buffering=line_buffering))
    output.warn_plainly()
    logs.configure(quiet=True)  # a command that trains shows more


def say(line: str) -> None:
    """Log one line that the user should see even under `--quiet`."""
    logger.warning("%s", line)


class ProgressLine:
    """Shows a run's records: a live line in a terminal; elsewhere a line per evaluation and occasional ones in between."""

    def __init__(self, total_updates: int, epochs: int, done: int = 0) -> None:
        self.total, self.epochs = total_updates, epochs
        self._last: JsonMapping = {}
        self._shown: int | None = None  # the update of the last line; its figures are not repeated
        self._first, self._began = done, time.monotonic()  # the earlier updates of a resumed run
        self._printed = self._began
        self._bar: rich.progress.Progress | None = None
        self._live = contextlib.ExitStack()
        if is_live():
            self._bar, self._task = _bar(total_updates)
            self._live.enter_context(self._bar)
            self._live.enter_context(logs.above(self._bar.console))  # closed first: its messages need the bar

    def log(self, record: JsonMapping) -> None:
        """Show a training or evaluation record."""
        if record["event"] == "train":
            self._last = record
            if self._bar is not None:
                left, bar = self._left(record["update"]), self._bar
                room = bar.console.width - BAR - len(left) - 2
                bar.update(self._task, completed=record["update"], left=left, text=self._text(record, room))
            elif time.monotonic() - self._printed > LINE_EVERY_S:
                self._shown = record["update"]
                self._print(self._text(record), record["update"])
        elif record["event"] == "evaluate":
            self._evaluation(record)

    def _evaluation(self, record: JsonMapping) -> None:
        if record.get("weights", "final") != "final":
            return  # the result shows it
        figures = {k: v for k, v in record.items() if k not in ("event", "update", "epoch", "time", "set", "weights")}
        metrics = [f"{record['set']} {name} {number(value)}" for name, value in figures.items()]
        again = record["update"] == self._shown
        self._shown = record["update"]
        room = None if self._bar is None else self._bar.console.width - 2
        text = self._text(self._last, room, metrics) if self._last and not again else "  ".join(metrics)
        if self._bar is not None:
            self._bar.console.print(f"  {text}", highlight=False)
        else:
            self._print(text, None if again else record["update"])

    def _left(self, update: int) -> str:
        """The remaining time of the run; "" if unknown."""
        made = update - self._first
        if made <= 0 or update >= self.total:
            return ""
        return f"about {duration((time.monotonic() - self._began) / made * (self.total - update))} left"

    def _print(self, line: str, update: int | None) -> None:
        """Print a line, with the remaining time after an update."""
        self._printed = time.monotonic()
        echo("  ".join(filter(None, (line, self._left(update) if update is not None else ""))))

    def _text(self, r: JsonMapping, room: int | None = None, metrics: Sequence[str] = ()) -> str:
        """A record as a line of at most `room` characters; the least important parts are left out first."""
        from drivetrain.core.machine.device import memory_now

        waits = r.get("rank_work_excess", 0.0)
        parts = [  # (the first to be left out has the highest number, text)
            (0, f"epoch {r['epoch'] + 1}/{self.epochs}"),
            (1, f"update {r['update']}/{self.total}"),
            (0, f"loss {'overflow' if r['loss'] is None else number(r['loss'])}"),
            (4, f"lr {r['lr']:.2e}"),
            (2, f"{number(r['samples_per_second']) if r['samples_per_second'] else '–'} samples/s"),
            (6, f"MFU {100 * r['mfu']:.1f} %" if r.get("mfu") is not None else ""),
            (5, f"data wait {100 * r['data_wait']:.0f} %"),
            (3, f"{100 * waits:.0f} % waits for rank {r['slowest_rank']}" if waits > SLOW_RANK else ""),
            (7, f"{memory_now() / 2**30:.2f} GiB"),
            *((0, metric) for metric in metrics),
        ]
        parts = [part for part in parts if part[1]]
        while room is not None and sum(len(text) + 2 for _, text in parts) - 2 > room and max(parts)[0]:
            parts.remove(max(parts))
        return "  ".join(text for _, text in parts)

    def log_image(self, name: str, update: int, path: Path) -> None:
        """Show nothing: a terminal has no pictures."""

    def close(self, status: str = "completed") -> None:
        """End the live line."""
        self._live.close()


def _bar(total: int) -> tuple[rich.progress.Progress, rich.progress.TaskID]:
    """A live line, not yet drawn, and its one task."""
    from rich.progress import BarColumn, Progress, TextColumn

    columns = BarColumn(bar_width=BAR), *(TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("left", "text"))
    # Not rich's global console: it remembers whether the first output was a terminal, and does not check this one.
    bar = Progress(*columns, console=output.console(), refresh_per_second=4)
    return bar, bar.add_task("train", total=total, text="starting", left="")


def duration(seconds: float) -> str:
    """A duration in few characters."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def number(value: float) -> str:
    """A number in few digits."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"


def show_result(result: Result, noted: bool = False) -> None:
    """Show a run's result as a table; `noted` is True if lines above it already have its remarks."""
    Table(("", "result"), result.rows(number, noted)).show()
    of_what, found = plots.of_result(result.tables)
    for name, values in found.items():
        shown = plots.shown(name, values)
        echo(f"\n{shown.name}, {of_what}")
        shown.show()


def show_jobs(results: Sequence[tuple[int, str, Result]], ranked_by: str | None = None, winner: int | None = None) -> None:
    """Show a sweep's jobs in one table. A job is (number, the overrides it does not share, result).

    The last metric columns rank the jobs: the best evaluation of `ranked_by`. The `winner` has a star.
    """
    names = list(dict.fromkeys((r.judged_by, n) for _, _, r in results for n in r.judged("final")))
    ranks = list(dict.fromkeys(r.judged_by for _, _, r in results if ranked_by in r.judged("best")))
    rows = []
    for job, label, r in results:
        figures = {(r.judged_by, n): number(value) for n, value in r.judged("final").items()}
        metrics = [figures.get(name, "–") for name in names]
        best = handed_on(r.judged("best"))
        metrics += [
            f"{number(best[ranked_by])}{r.when(best)}" if r.judged_by == of and ranked_by in best else "–" for of in ranks
        ]
        rate = number(r.samples_per_second) if r.samples_per_second else "–"
        star = f"{job} *" if job == winner else str(job)
        rows.append([star, label, r.status, *metrics, rate, f"{r.wall_s:.1f} s", r.in_short])
    bests = [f"best {of} {ranked_by}" for of in ranks]
    figures_of = [" ".join(name) for name in names]
    header = ["job", "overrides", "status", *figures_of, *bests, "samples/s", "time", "note"]
    spare = ["samples/s", "time", *(name for name in figures_of if f"best {name}" in bests), *reversed(figures_of)]
    Table(header, rows, spare=spare).used(len(header) - 1).show()
