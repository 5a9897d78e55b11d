"""Runs a sweep: starts or resumes it, launches its jobs, waits for them, and shows their results."""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from drivetrain.config.hydra_words import is_hydra_override
from drivetrain.core.errors import DONE, FAILED, INTERRUPTED, UserError, collecting, refuse
from drivetrain.core.machine import accelerators, files
from drivetrain.core.machine.guards import usable_cores
from drivetrain.core.machine.paths import add_import_paths
from drivetrain.core.machine.signals import SignalForwarder
from drivetrain.core.options.overrides import key_of
from drivetrain.core.options.selection import Selection, handed_on
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import device_problems
from drivetrain.run import directory, records
from drivetrain.sweeps import store
from drivetrain.sweeps.launchers import Forked, Launcher, OnRay, Submitit
from drivetrain.sweeps.options import Joblib, Optuna, Ray, SubmititLocal, SubmititSlurm, SweepSettings, split
from drivetrain.sweeps.store import LENGTH, Grid, StoredJob, Sweep, prepare
from drivetrain.ui import output, sheet, terminal
from drivetrain.ui.output import echo
from drivetrain.ui.terminal import duration

if TYPE_CHECKING:
    from drivetrain.sweeps.optuna import Search

logger = logging.getLogger(__name__)

TAIL = 4096  # bytes at the end of a metrics.jsonl with its last records
RESERVED_LINES = 8  # lines of the screen outside the table


def progress(entry: StoredJob) -> tuple[JsonObject, int | None]:
    """A job's last training record ({} before the first) and its number of updates (None until it is built)."""
    try:
        length = int(files.read_text(entry.run_dir / LENGTH))
    except (OSError, ValueError):
        length = None
    return records.last(_tail(entry.run_dir / "metrics.jsonl"), "train") or {}, length


def _tail(path: Path) -> bytes:
    with suppress(OSError), files.opened(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        return file.read()
    return b""


def share(entry: StoredJob) -> float:
    """The completed share of a job's updates."""
    record, length = progress(entry)
    return min(1.0, record["update"] / length) if record and length else 0.0


class Display:
    """Shows the progress of jobs: if `live`, in a table redrawn in place, else by a line at each job's start and end."""

    def __init__(self, total: int, live: Live | None = None, jobs_print: bool = False) -> None:
        self.total, self._live = total, live
        self._jobs_print = jobs_print  # the jobs' own output appears between the lines
        self._done = 0  # jobs
        self._work = 0.0  # in jobs, since this process began
        self._clock = time.monotonic()

    def keep(self, entries: Sequence[StoredJob]) -> None:
        """Count jobs that ended before this process began."""
        self._done += len(entries)
        if entries and self._live is None:
            echo(f"{len(entries)} of {self.total} jobs are done already")

    def begin(self, entry: StoredJob) -> None:
        """Note that a job begins, or was found running."""
        entry.began, entry.before = time.monotonic(), share(entry)
        if self._jobs_print:
            echo(f"\n{self._name(entry)}")

    def end(self, entry: StoredJob, running: Sequence[StoredJob]) -> None:
        """Note that a job has ended; `running` are the others."""
        self._done += 1
        self._work += 1 - entry.before if entry.began else 0
        if self._live is not None or entry.result is None:
            return
        left = self._left(running, ", ")
        took = f" in {duration(entry.seconds())}" if entry.began else ""
        echo(f"{self._name(entry)} {entry.result.status}{took}{left}")
        if entry.result.error and not (self._jobs_print and entry.began):
            logger.error("job %d: %s", entry.number, entry.result.error)

    def refresh(self, entries: Sequence[StoredJob], running: Sequence[StoredJob]) -> None:
        """Show the progress of the running jobs."""
        if self._live is not None:
            size = self._live.console.size
            self._live.update(self.table(entries, running, size.height - RESERVED_LINES, size.width), refresh=True)

    def seconds_left(self, running: Sequence[StoredJob]) -> float | None:
        """Seconds until all jobs are done, at the pace so far; None before any progress."""
        part = sum(max(0.0, share(e) - e.before) for e in running)
        work = self._work + part
        return (time.monotonic() - self._clock) / work * max(0.0, self.total - self._done - part) if work else None

    def _left(self, running: Sequence[StoredJob], before: str) -> str:
        seconds = self.seconds_left(running)
        return f"{before}about {duration(seconds)} left" if seconds else ""

    def _name(self, entry: StoredJob) -> str:
        return f"job {entry.number} ({entry.number + 1} of {self.total}): {entry.job.label or 'the only one'}"

    def table(
        self, entries: Sequence[StoredJob], running: Sequence[StoredJob], max_rows: int, room: int | None = None
    ) -> RichTable:
        """The table of at most `max_rows` jobs: all of them if they fit, else the running ones."""
        counts = Counter(e.result.status for e in entries if e.result)
        counted = "".join(f" · {n} {status}" for status, n in counts.items() if status != "completed")
        title = f"{self._done} of {self.total} done{counted}{self._left(running, ' · ')}"
        table = RichTable(title=title, title_justify="left", title_style="bold")
        header = ["job", "overrides", "status", "updates", "loss", "samples/s", "time"]
        rows = [row(e, e in running) for e in (entries if len(entries) <= max_rows else running[:max_rows])]
        fitting, _ = sheet.Table(header, rows, spare=("samples/s", "time")).fitting(room)
        for name in fitting.header:
            table.add_column(name, overflow="ellipsis", no_wrap=name != "overrides")  # shortened first, in one line
        for cells in fitting.texts():
            table.add_row(*(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells))
        return table


def row(entry: StoredJob, runs: bool) -> list[str]:
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


# Imported once, before the jobs are forked.
PRELOADED = ("torch", "drivetrain.engine.build", "drivetrain.saving.checkpoint_io")
POLL_S = 0.25


@dataclass
class SweepPlan:
    """A validated sweep, before anything is written."""

    settings: SweepSettings
    overrides: list[str]
    config_dirs: list[str]
    source: Grid | Search  # all jobs, or the search that proposes them


def run(overrides: Sequence[str], config_dirs: Sequence[str] = (), quiet: bool = False) -> tuple[Path, int]:
    """Run all jobs and show them in a table; return the folder and the exit code. Raises UserError if no job can run."""
    overrides = directory.with_last(overrides)
    resume = next((o.partition("=")[2].strip("'\"") for o in overrides if key_of(o) == "resume"), "null")
    own, dirs = [o for o in overrides if key_of(o) != "resume"], [str(Path(d).resolve()) for d in config_dirs]
    if resume not in ("null", "", "auto"):
        return _resume(Path(os.path.expanduser(resume)), own, quiet)
    plan = _plan(own, dirs)
    root = Path(plan.source.first.run.values["output_dir"])
    named = plan.settings.hydra.path("sweep.dir", plan.source.first.composed)
    if resume == "auto":
        if (found := next(store.unfinished(root, own, named), None)) is not None:
            return _run_in(found, plan, quiet)
        logger.warning("resume=auto: there is no unfinished sweep with these overrides: a new one starts")
    path = named or directory.new(root, "multirun")
    refuse(directory.cannot_take(path, "hydra.sweep.dir", "-m resume"))
    if path.is_dir() and any(path.iterdir()):  # a job clears its folder, and that could be one of these
        raise UserError(f"hydra.sweep.dir={path} is not empty: a sweep needs its own folder")
    directory.make(path, exist_ok=named is not None)
    try:
        return _run_in(path, plan, quiet)
    except UserError:
        if not any(path.rglob("result.json")):
            directory.remove(path)  # no job started
        raise


def _resume(path: Path, given: Sequence[str], quiet: bool) -> tuple[Path, int]:
    """Resume the sweep in `path`; `given` may only change how it is launched."""
    content = store.read_own(path)
    overrides, dirs = store.merge_overrides(path, content["overrides"], given), content["config_dirs"]
    add_import_paths(dirs)
    plan = _plan(overrides, dirs)
    if isinstance(plan.source, Grid) and [j.overrides for j in plan.source.jobs] != [j["overrides"] for j in content["jobs"]]:
        raise UserError(f"-m resume={path}: its overrides now give other jobs, because the grid of its recipe has changed")
    return _run_in(path, plan, quiet)


def _plan(overrides: list[str], config_dirs: list[str]) -> SweepPlan:
    """Compose and validate the sweep. Raises UserError with every problem."""
    problems: list[str] = []
    settings, own = None, [o for o in overrides if not is_hydra_override(o)]
    source: Grid | Search | None = None
    with collecting(problems):
        settings, _ = split(overrides)
    with collecting(problems):
        if settings is not None and isinstance(settings.sweeper, Optuna):
            from drivetrain.sweeps.optuna import Search  # optuna may be missing

            source = Search(settings.sweeper, own, config_dirs)
        elif settings is not None or not any(o.startswith("hydra/sweeper=") for o in overrides):
            jobs = prepare(own, config_dirs)
            source = Grid(jobs)
            problems += [p for j in jobs for p in j.problems]
            if not problems and settings is not None and not isinstance(settings.launcher, SubmititSlurm):
                problems += device_problems(job.job for job in jobs)
    subdir = settings.hydra.given.get("sweep.subdir") if settings is not None else None
    if subdir is not None and "job.num" not in subdir and not isinstance(source, Grid):
        problems.append(f"hydra.sweep.subdir={subdir}: a search may try values twice: put ${{hydra.job.num}} into it")
    if problems or settings is None or source is None:
        raise UserError(dict.fromkeys(problems))
    return SweepPlan(settings, overrides, config_dirs, source)


def _run_in(path: Path, plan: SweepPlan, quiet: bool) -> tuple[Path, int]:
    """Run the plan's jobs in the sweep's folder; return the folder and the exit code."""
    for module in PRELOADED:
        importlib.import_module(module)
    accelerators.find()  # once, and not in every job
    began, source, searches = time.monotonic(), plan.source, not isinstance(plan.source, Grid)
    with directory.locked(path):
        sweep = Sweep(path, plan.overrides, plan.config_dirs, plan.settings.hydra)
        source.begin(sweep)
        # In a terminal one table is shown, and the jobs' output goes to their folders. Only refresh() redraws the table,
        # and streams are not redirected, because the forked jobs would inherit that.
        live = Live(console=output.console(), auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
        table = live if terminal.is_live() else None
        launcher = _launcher(plan.settings, sweep, source.total, quiet, table is not None)
        echo(f"{source.total} {'trials' if searches else 'jobs'} in {path}")
        display = Display(source.total, table, isinstance(launcher, Forked) and not launcher.captured and not quiet)
        with SignalForwarder() as signals, table or nullcontext(), signals.to(launcher.signal):
            display.keep(source.kept)
            running = _run_jobs(source, sweep, launcher, display, signals)
        objective = source.objective
        store.write_summary(sweep, objective, time.monotonic() - began, source.is_finished())
    echo()
    _show(sweep, objective)
    return path, _exit_code(sweep, searches, signals, running)


def _show(sweep: Sweep, objective: Selection | None) -> None:
    """Print the jobs as a table, and the best of them as a command to copy."""
    best = store.best_of(sweep.entries, objective)
    jobs = [(e.number, e.job.label, e.result) for e in sweep.entries if e.result is not None]
    terminal.show_jobs(jobs, objective.name if objective else None, best.number if best else None)
    if objective is None or best is None or best.result is None:
        return
    overrides = shlex.join(o for o in best.job.overrides if not is_hydra_override(o))
    figures = handed_on(best.result.judged("best"))
    value = f"{best.result.judged_by} {objective.name} {terminal.number(figures[objective.name])}{best.result.when(figures)}"
    echo(f"\nbest: job {best.number}, {value} ({best.job.label or 'the only one'}){store.ties(sweep.entries, objective, best)}")
    if (mean := store.means(sweep.entries, objective).get(store.config_of(best))) is not None:
        echo(f"  the mean of its config over seeds and folds: {objective.name} {terminal.number(mean)} at the end of training")
    dirs = "".join(f"--config-dir {shlex.quote(folder)} " for folder in sweep.config_dirs)
    echo(f"  drivetrain train {dirs}{overrides}")
    echo(f"  its recipe: {best.run_dir / 'recipe.yaml'}")


def _launcher(settings: SweepSettings, sweep: Sweep, jobs: int, quiet: bool, captured: bool) -> Launcher:
    option, sweeper = settings.launcher, settings.sweeper
    trials = sweeper.n_jobs if isinstance(sweeper, Optuna) else None  # at a time
    if isinstance(option, SubmititLocal | SubmititSlurm):
        return Submitit(option, sweep.path, trials or jobs, quiet, settings.hydra.given.get("job.name", "drivetrain"))
    if isinstance(option, Ray):
        return OnRay(option, sweep.path, trials or jobs, quiet)
    slots = trials or 1
    if isinstance(option, Joblib):
        slots = usable_cores() if option.n_jobs == -1 else option.n_jobs
    return Forked(slots, quiet, captured)


def _run_jobs(
    source: Grid | Search, sweep: Sweep, launcher: Launcher, display: Display, signals: SignalForwarder
) -> list[StoredJob]:
    """Start jobs as slots become free, until all have ended; return those that outlive this process."""
    running: list[StoredJob] = []
    while True:
        asked = source.ask(launcher.slots - len(running)) if not signals.raised else []
        able = [entry for entry in asked if entry.job.job is not None]
        ended = [entry for entry in asked if entry.job.job is None]
        for entry in ended:
            entry.refuse()
        new = launcher.new(able)
        for entry in able:
            display.begin(entry)
        launcher.start(new)
        running += able
        if not ended:
            if not running or (signals.raised and launcher.detached):
                return running
            ended = launcher.wait(POLL_S, bool(signals.raised))
        for entry in ended:
            running = [e for e in running if e is not entry]
            source.tell(entry)
            display.end(entry, running)
        display.refresh(sweep.entries, running)


def _exit_code(sweep: Sweep, searches: bool, signals: SignalForwarder, running: Sequence[StoredJob]) -> int:
    """The exit code; warns of jobs that did not complete."""
    command = f"drivetrain train -m resume={shlex.quote(str(sweep.path))}"
    if running:
        logger.warning("%d jobs run on in Slurm: see them again by %s", len(running), command)
    elif signals.raised:
        logger.warning("stopped: resume by %s", command)
    if signals.raised:
        return INTERRUPTED
    codes = [e.result.code for e in sweep.entries if e.result is not None]
    failed = [code for code in codes if code]
    if failed:
        logger.warning("%d of %d jobs did not complete", len(failed), len(codes))
    if searches and len(failed) < len(codes):
        return DONE  # a search succeeds even if some of its trials fail
    return failed[0] if len(set(failed)) == 1 else FAILED if failed else DONE
