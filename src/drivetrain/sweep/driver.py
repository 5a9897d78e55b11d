"""A sweep from its words to its table: begun or gone on with, its jobs started, waited for, and told of."""

from __future__ import annotations

import importlib
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.core.cpus import usable_cores
from drivetrain.core.errors import FAILED, INTERRUPTED, UserError
from drivetrain.core.option import RunSpec
from drivetrain.core.overrides import key_of
from drivetrain.core.paths import add_import_paths
from drivetrain.run import directory
from drivetrain.sweep import objective, store
from drivetrain.sweep.forked import Forked, Forward, Launcher
from drivetrain.sweep.grid import SweepJob, prepare
from drivetrain.sweep.options import Joblib, Optuna, Settings, SubmititLocal, SubmititSlurm, is_hydras, split
from drivetrain.sweep.optuna import Search, Space
from drivetrain.sweep.progress_table import Board, LiveBoard
from drivetrain.sweep.store import Entry, Sweep
from drivetrain.sweep.submitit import Submitit
from drivetrain.ui import terminal

FORKED_WITH = (
    "torch",
    "drivetrain.engine.build",
    "drivetrain.saving.checkpoint_io",
    "rich.console",
)  # loaded once: the jobs are forked
TICK_S = 0.25  # between two looks at what runs


@dataclass
class Plan:
    """What was asked for, found good, before anything is written."""

    settings: Settings
    words: list[str]
    config_dirs: list[str]
    jobs: list[SweepJob] | Space  # all of them, or where they come from

    @property
    def run(self) -> RunSpec:
        """One of the runs."""
        if isinstance(self.jobs, Space):
            return self.jobs.run
        return next(j.job.run for j in self.jobs if j.job is not None)


class Grid:
    """Where a sweep's jobs come from, when all of them are known."""

    def __init__(self, jobs: Sequence[SweepJob], sweep: Sweep) -> None:
        self._entries = sweep.add(jobs)
        self.total = len(jobs)
        self.kept = [entry for entry in self._entries if entry.keep()]
        self._waiting = [entry for entry in self._entries if entry.result is None]

    def take(self, count: int) -> list[Entry]:
        """The next jobs, as many as are wanted and left."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def told(self, entry: Entry) -> None:
        """A job has ended."""

    def is_finished(self) -> bool:
        """Whether nothing is left to run."""
        return objective.all_final(self._entries)


def run(overrides: Sequence[str], config_dirs: Sequence[str] = (), quiet: bool = False) -> int:
    """Run all jobs and show them in a table; the exit code. Raises UserError if no job is good."""
    asked = next((w.partition("=")[2].strip("'\"") for w in overrides if key_of(w) == "resume"), "null")
    words, dirs = [w for w in overrides if key_of(w) != "resume"], [str(Path(d).resolve()) for d in config_dirs]
    if asked not in ("null", "", "auto"):
        path = Path(os.path.expanduser(asked))
        content = store.read(path)
        words, dirs = store.with_beside(path, content["words"], words), content["config_dirs"]
        add_import_paths(dirs)
        plan = _plan(words, dirs)
        if isinstance(plan.jobs, list) and [j.words for j in plan.jobs] != [j["overrides"] for j in content["jobs"]]:
            raise UserError(f"-m resume={path}: its words make other jobs than then: the recipe's sweep has changed")
        return _run_in(path, plan, quiet)
    plan = _plan(words, dirs)
    root = Path(plan.run.values["output_dir"])
    if asked == "auto":
        if (found := next(store.unfinished(root, words), None)) is not None:
            return _run_in(found, plan, quiet)
        terminal.say("resume=auto: no unfinished sweep with these words: a new one starts")
    path = directory.create(root, "multirun")
    try:
        return _run_in(path, plan, quiet)
    except UserError:
        if not any(path.glob("*/result.json")):
            directory.remove(path)  # it never was a sweep
        raise


def _plan(words: list[str], config_dirs: list[str]) -> Plan:
    """Raises UserError with all that is wrong."""
    problems: list[str] = []
    settings, own = None, [w for w in words if not is_hydras(w)]
    try:
        settings, _ = split(words)
    except UserError as error:
        problems += error.problems
    jobs: list[SweepJob] | Space = []
    try:
        if settings is not None and isinstance(settings.sweeper, Optuna):
            jobs = Space(settings.sweeper, own, config_dirs)
        elif settings is not None or not any(w.startswith("hydra/sweeper=") for w in words):
            jobs = prepare(own, config_dirs)
            if all(j.job is None for j in jobs):
                problems += [p for j in jobs for p in j.problems]
    except UserError as error:
        problems += error.problems
    if problems or settings is None:
        raise UserError(dict.fromkeys(problems))
    return Plan(settings, words, config_dirs, jobs)


def _run_in(path: Path, plan: Plan, quiet: bool) -> int:
    for module in FORKED_WITH:
        importlib.import_module(module)
    began = time.monotonic()
    with directory.held(path):
        sweep = Sweep(path, plan.words, plan.config_dirs)
        source = Search(plan.jobs, sweep) if isinstance(plan.jobs, Space) else Grid(plan.jobs, sweep)
        # Who watches a terminal sees one table; the jobs' own lines go to their folders.
        captured = terminal.is_live()
        launcher = _launcher(plan.settings, sweep, source.total, quiet, captured)
        print(f"{source.total} {'trials' if isinstance(source, Search) else 'jobs'} in {path}", flush=True)
        heard = isinstance(launcher, Forked) and not launcher.captured
        board = LiveBoard(source.total) if captured else Board(source.total, heard, quiet)
        with Forward() as stop, board:
            board.keep(source.kept)
            stop.launcher = launcher
            running = _drive(source, sweep, launcher, board, stop)
            stop.launcher = None
        judged = source.space.objective if isinstance(source, Search) else objective.common(sweep.entries)
        objective.write(sweep, judged, time.monotonic() - began, source.is_finished())
    print()
    objective.show(sweep, judged)
    return _code(sweep, source, stop, running)


def _launcher(settings: Settings, sweep: Sweep, jobs: int, quiet: bool, captured: bool) -> Launcher:
    option = settings.launcher
    if isinstance(option, SubmititLocal | SubmititSlurm):
        slots = settings.sweeper.n_jobs if isinstance(settings.sweeper, Optuna) else jobs
        return Submitit(option, sweep.path, slots, quiet)
    slots = settings.sweeper.n_jobs if isinstance(settings.sweeper, Optuna) else 1
    if isinstance(option, Joblib):
        slots = usable_cores() if option.n_jobs == -1 else option.n_jobs
    return Forked(slots, quiet, captured)


def _drive(source: Grid | Search, sweep: Sweep, launcher: Launcher, board: Board, stop: Forward) -> list[Entry]:
    """Start jobs as there is room, and tell of those that end; the jobs that run on without this process."""
    running: list[Entry] = []
    while True:
        ended = []
        if not stop.raised:
            taken = source.take(launcher.slots - len(running))
            ended = [entry for entry in taken if entry.job.job is None]
            new = [entry for entry in taken if entry.job.job is not None]
            for entry in ended:
                entry.refuse()
            fresh = [entry for entry in new if not launcher.attach(entry)]
            for entry in fresh:
                entry.make_ready()
            for entry in new:
                board.begin(entry)
            running += new
            launcher.start(fresh)
        if not ended:
            if not running or (stop.raised and launcher.detached):
                return running
            ended = launcher.wait(TICK_S, bool(stop.raised))
        for entry in ended:
            running = [e for e in running if e is not entry]
            source.told(entry)
            board.end(entry, running)
        board.refresh(sweep.entries, running)


def _code(sweep: Sweep, source: Grid | Search, stop: Forward, running: Sequence[Entry]) -> int:
    """The exit code, and what is to be said with it."""
    again = f"drivetrain train -m resume={shlex.quote(str(sweep.path))}"
    if running:
        terminal.say(f"{len(running)} jobs run on in Slurm: see them again by {again}")
    elif stop.raised:
        terminal.say(f"stopped: go on by {again}")
    if stop.raised:
        return INTERRUPTED
    ended = [e for e in sweep.entries if e.result is not None]
    failed = [e.code for e in ended if e.code]
    if failed:
        terminal.say(f"{len(failed)} of {len(ended)} jobs did not complete")
    if isinstance(source, Search) and len(failed) < len(ended):
        return 0  # a trial that fails is no failure of the search
    return failed[0] if len(set(failed)) == 1 else FAILED if failed else 0
