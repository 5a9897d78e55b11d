"""Runs a sweep: starts or resumes it, launches its jobs, waits for them, and shows their results."""

from __future__ import annotations

import importlib
import logging
import os
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.config.hydra_words import is_hydra_override
from drivetrain.core import accelerators, files
from drivetrain.core.errors import FAILED, INTERRUPTED, UserError
from drivetrain.core.limits import usable_cores
from drivetrain.core.overrides import key_of
from drivetrain.core.paths import add_import_paths
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import Job, device_problems
from drivetrain.run import directory, records
from drivetrain.sweeps import store
from drivetrain.sweeps.launchers import Forked, Launcher, OnRay, SignalForwarder, Submitit
from drivetrain.sweeps.options import Joblib, Optuna, Ray, Settings, SubmititLocal, SubmititSlurm, split
from drivetrain.sweeps.optuna import Search, SearchSpace
from drivetrain.sweeps.store import LENGTH, Entry, Objective, Sweep, SweepJob, prepare
from drivetrain.ui import output, sheet, terminal
from drivetrain.ui.output import echo
from drivetrain.ui.terminal import duration

if TYPE_CHECKING:
    from rich.table import Table as RichTable

logger = logging.getLogger(__name__)

TAIL = 4096  # bytes at the end of a metrics.jsonl that hold its last records
RESERVED_LINES = 8  # of the screen, beside the table


def progress(entry: Entry) -> tuple[JsonObject, int | None]:
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

    def table(self, entries: Sequence[Entry], running: Sequence[Entry], max_rows: int) -> RichTable:
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


logger = logging.getLogger(__name__)

# Imported once, before the jobs are forked.
PRELOADED = ("torch", "drivetrain.engine.build", "drivetrain.saving.checkpoint_io", "rich.console")
POLL_S = 0.25


@dataclass
class Plan:
    """A validated sweep, before anything is written."""

    settings: Settings
    overrides: list[str]
    config_dirs: list[str]
    jobs: list[SweepJob] | SearchSpace  # all jobs, or the space that a search draws them from

    @property
    def first(self) -> Job:
        """One of the jobs."""
        if isinstance(self.jobs, SearchSpace):
            return self.jobs.first
        return next(j.job for j in self.jobs if j.job is not None)


class Grid:
    """Yields a sweep's jobs when all of them are known; has the interface of Search."""

    def __init__(self, jobs: Sequence[SweepJob], sweep: Sweep) -> None:
        self._entries = sweep.add(jobs)
        self.total = len(jobs)
        self.kept = [entry for entry in self._entries if entry.load_result()]  # ended before this process began
        # The jobs that cannot run come first, so that their mistakes are told before another one trains.
        self._waiting = sorted((e for e in self._entries if e.result is None), key=lambda e: e.job.job is not None)

    def ask(self, count: int) -> list[Entry]:
        """The next jobs, at most `count`."""
        entries, self._waiting = self._waiting[:count], self._waiting[count:]
        return entries

    def tell(self, entry: Entry) -> None:
        """A job has ended."""

    def is_finished(self) -> bool:
        """True if no job is left to run."""
        return all(e.result is not None and e.result.status in store.FINAL for e in self._entries)


def run(overrides: Sequence[str], config_dirs: Sequence[str] = (), quiet: bool = False) -> tuple[Path, int]:
    """Run all jobs and show them in a table; return the folder and the exit code. Raises UserError if no job can run."""
    resume = next((o.partition("=")[2].strip("'\"") for o in overrides if key_of(o) == "resume"), "null")
    own, dirs = [o for o in overrides if key_of(o) != "resume"], [str(Path(d).resolve()) for d in config_dirs]
    if resume not in ("null", "", "auto"):
        return _resume(Path(os.path.expanduser(resume)), own, quiet)
    plan = _plan(own, dirs)
    root = Path(plan.first.run.values["output_dir"])
    named = plan.settings.hydra.path("sweep.dir", plan.first.composed)
    if resume == "auto":
        if (found := next(store.unfinished(root, own, named), None)) is not None:
            return _run_in(found, plan, quiet)
        logger.warning("resume=auto: there is no unfinished sweep with these overrides: a new one starts")
    path = named or directory.new(root, "multirun")
    if wrong := list(directory.cannot_take(path, "hydra.sweep.dir", "-m resume")):
        raise UserError(wrong)
    if path.is_dir() and any(path.iterdir()):  # a job clears its folder, which could be one of these
        raise UserError(f"hydra.sweep.dir={path} is not empty: a sweep needs a folder of its own")
    directory.make(path, exist_ok=named is not None)
    try:
        return _run_in(path, plan, quiet)
    except UserError:
        if not any(path.rglob("result.json")):
            directory.remove(path)  # no job was started
        raise


def _resume(path: Path, given: Sequence[str], quiet: bool) -> tuple[Path, int]:
    """Resume the sweep in `path`; `given` may only change how it is launched."""
    content = store.read_own(path)
    overrides, dirs = store.merge_overrides(path, content["overrides"], given), content["config_dirs"]
    add_import_paths(dirs)
    plan = _plan(overrides, dirs)
    if isinstance(plan.jobs, list) and [j.overrides for j in plan.jobs] != [j["overrides"] for j in content["jobs"]]:
        raise UserError(f"-m resume={path}: its overrides make other jobs now: the grid of its recipe has changed")
    return _run_in(path, plan, quiet)


def _plan(overrides: list[str], config_dirs: list[str]) -> Plan:
    """Compose and validate the sweep. Raises UserError with every problem."""
    problems: list[str] = []
    settings, own = None, [o for o in overrides if not is_hydra_override(o)]
    try:
        settings, _ = split(overrides)
    except UserError as error:
        problems += error.problems
    jobs: list[SweepJob] | SearchSpace = []
    try:
        if settings is not None and isinstance(settings.sweeper, Optuna):
            jobs = SearchSpace(settings.sweeper, own, config_dirs)
        elif settings is not None or not any(o.startswith("hydra/sweeper=") for o in overrides):
            jobs = prepare(own, config_dirs)
            problems += [p for j in jobs for p in j.problems]
            if not problems and settings is not None and not isinstance(settings.launcher, SubmititSlurm):
                problems += device_problems(job.job for job in jobs)
    except UserError as error:
        problems += error.problems
    subdir = settings.hydra.given.get("sweep.subdir") if settings is not None else None
    if subdir is not None and isinstance(jobs, SearchSpace) and "job.num" not in subdir:
        problems.append(f"hydra.sweep.subdir={subdir}: a search may try values twice: put ${{hydra.job.num}} into it")
    if problems or settings is None:
        raise UserError(dict.fromkeys(problems))
    return Plan(settings, overrides, config_dirs, jobs)


def _run_in(path: Path, plan: Plan, quiet: bool) -> tuple[Path, int]:
    """Run the plan's jobs in the sweep's folder; return the folder and the exit code."""
    for module in PRELOADED:
        importlib.import_module(module)
    accelerators.find()  # once, and not in every job
    began = time.monotonic()
    with directory.locked(path):
        sweep = Sweep(path, plan.overrides, plan.config_dirs, plan.settings.hydra)
        source = Search(plan.jobs, sweep) if isinstance(plan.jobs, SearchSpace) else Grid(plan.jobs, sweep)
        live = terminal.is_live()  # then one table is shown, and the jobs' own output goes to their folders
        launcher = _launcher(plan.settings, sweep, source.total, quiet, live)
        echo(f"{source.total} {'trials' if isinstance(source, Search) else 'jobs'} in {path}")
        jobs_print = isinstance(launcher, Forked) and not launcher.captured
        display = LiveTable(source.total) if live else ProgressLines(source.total, jobs_print, quiet)
        with SignalForwarder() as signals, display:
            display.keep(source.kept)
            signals.launcher = launcher
            running = _run_jobs(source, sweep, launcher, display, signals)
            signals.launcher = None
        judged_by = source.space.objective if isinstance(source, Search) else store.common(sweep.entries)
        store.write_summary(sweep, judged_by, time.monotonic() - began, source.is_finished())
    echo()
    _show(sweep, judged_by)
    return path, _exit_code(sweep, source, signals, running)


def _show(sweep: Sweep, objective: Objective | None) -> None:
    """Print the jobs as a table, and the best of them as a command to copy."""
    best = objective.best(sweep.entries) if objective else None
    jobs = [(e.number, e.job.label, e.result) for e in sweep.entries if e.result is not None]
    terminal.show_jobs(jobs, objective.metric if objective else None, best.number if best else None)
    if objective is None or best is None or best.result is None:
        return
    overrides = shlex.join(o for o in best.job.overrides if not is_hydra_override(o))
    value = terminal.number(objective.value(best.result) or 0.0) + best.result.when(best.result.judged("best"))
    what = f"{best.result.judged_by} {objective.metric}"
    echo(f"\nbest: job {best.number}, {what} {value} ({best.job.label or 'the only one'})")
    dirs = "".join(f"--config-dir {shlex.quote(folder)} " for folder in sweep.config_dirs)
    echo(f"  drivetrain train {dirs}{overrides}")
    echo(f"  its recipe: {best.run_dir / 'recipe.yaml'}")


def _launcher(settings: Settings, sweep: Sweep, jobs: int, quiet: bool, captured: bool) -> Launcher:
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
    source: Grid | Search, sweep: Sweep, launcher: Launcher, display: ProgressLines, signals: SignalForwarder
) -> list[Entry]:
    """Start jobs as slots get free, until all have ended; return those that run on without this process."""
    running: list[Entry] = []
    while True:
        ended = []
        if not signals.raised:
            asked = source.ask(launcher.slots - len(running))
            ended = [entry for entry in asked if entry.job.job is None]
            for entry in ended:
                entry.refuse()
            running += _start([entry for entry in asked if entry.job.job is not None], launcher, display)
        if not ended:
            if not running or (signals.raised and launcher.detached):
                return running
            ended = launcher.wait(POLL_S, bool(signals.raised))
        for entry in ended:
            running = [e for e in running if e is not entry]
            source.tell(entry)
            display.end(entry, running)
        display.refresh(sweep.entries, running)


def _start(entries: list[Entry], launcher: Launcher, display: ProgressLines) -> list[Entry]:
    """Start these jobs, but those that another process runs already; return all of them."""
    new = [entry for entry in entries if not launcher.attach(entry)]
    for entry in new:
        entry.prepare_folder()
    for entry in entries:
        display.begin(entry)
    launcher.start(new)
    return entries


def _exit_code(sweep: Sweep, source: Grid | Search, signals: SignalForwarder, running: Sequence[Entry]) -> int:
    """The exit code; warns of jobs that did not complete."""
    command = f"drivetrain train -m resume={shlex.quote(str(sweep.path))}"
    if running:
        logger.warning("%d jobs run on in Slurm: see them again by %s", len(running), command)
    elif signals.raised:
        logger.warning("stopped: resume by %s", command)
    if signals.raised:
        return INTERRUPTED
    ended = [e for e in sweep.entries if e.result is not None]
    failed = [e.code for e in ended if e.code]
    if failed:
        logger.warning("%d of %d jobs did not complete", len(failed), len(ended))
    if isinstance(source, Search) and len(failed) < len(ended):
        return 0  # a search succeeds even if some of its trials fail
    return failed[0] if len(set(failed)) == 1 else FAILED if failed else 0
