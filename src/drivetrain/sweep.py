"""`-m`: every combination of the given values, each job in a process of its own, forked after torch was imported once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import drivetrain
from drivetrain import launch, rundir, terminal
from drivetrain import recipe as recipes
from drivetrain.compose import options
from drivetrain.errors import BAD_CONFIG, FAILED, INTERRUPTED, UserError
from drivetrain.job import Job
from drivetrain.job import prepare as prepare_job
from drivetrain.measure.result import Result, write_json
from drivetrain.words import as_word, key_of, parse


@dataclass
class SweepJob:
    """One combination: the words that differ from job to job, all its words, and what came of checking them."""

    label: str
    words: list[str]
    job: Job | None
    problems: list[str]


def prepare(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[SweepJob]:
    """A job for each combination of the values given, in Hydra's sweep grammar; a recipe's `sweep:` joins in."""
    axes, labelled = _axes(overrides)
    jobs = []
    for words in itertools.product(*axes):
        label = [w for w, differs in zip(words, labelled, strict=True) if differs]
        for cell, recipe in _cells(words, config_dirs):
            extra = [f"{k}={as_word(v)}" for k, v in cell.items()]
            jobs.append(_prepared(" ".join([*label, *extra]), list(words), extra, config_dirs, recipe))
    return jobs


def _axes(overrides: Sequence[str]) -> tuple[list[list[str]], list[bool]]:
    """The words of each override, one or several, and whether they differ from job to job."""
    from hydra.core.override_parser.types import ValueType
    from hydra.errors import HydraException

    axes: list[list[str]] = []
    labelled: list[bool] = []
    problems: list[str] = []
    for text in overrides:
        try:
            override = parse(text)
        except HydraException:
            problems.append(f"{text!r} is not of the form key=value, group=option or key=value,value")
            continue
        labelled.append(override.is_sweep_override())
        if not override.is_sweep_override():
            axes.append([text])
        elif override.value_type in (ValueType.CHOICE_SWEEP, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.RANGE_SWEEP):
            axes.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            problems.append(f"'{text}': a sweep goes through values that are listed: write them out as a,b,c or range(1,4)")
    if problems:
        raise UserError(problems)
    return axes, labelled


def _cells(words: Sequence[str], config_dirs: Sequence[str]) -> list[tuple[dict[str, Any], recipes.Recipe | None]]:
    recipe = _recipe_of(words)
    if recipe is None or not recipe.sweep:
        return [({}, None)]
    return list(recipe.cells(options(config_dirs), given={key_of(w) for w in words}))


def _recipe_of(words: Sequence[str]) -> recipes.Recipe | None:
    """The recipe that is named, if there is one that can be read: what is wrong with it is told where it is composed."""
    name = next((w.partition("=")[2].strip("'\"") for w in words if key_of(w) == "recipe"), "null")
    try:
        return recipes.read(recipes.find(name)) if name not in ("", "null") else None
    except UserError:
        return None


def is_sweep_recipe(overrides: Sequence[str]) -> bool:
    """Whether `recipe=…` among the overrides names a recipe with a grid: it runs as a sweep without -m."""
    recipe = _recipe_of(overrides)
    return recipe is not None and bool(recipe.sweep)


def run(overrides: Sequence[str], config_dirs: Sequence[str] = (), quiet: bool = False) -> int:
    """Run all jobs one after another and show them in a table; the exit code. Raises UserError if no job is good."""
    if any(key_of(w) == "resume" for w in overrides):
        raise UserError("resume= is one run's, and -m starts several: leave one of them out")
    jobs = prepare(overrides, config_dirs)
    if all(j.job is None for j in jobs):
        raise UserError(dict.fromkeys(p for j in jobs for p in j.problems))
    root = next(Path(j.job.run.values["output_dir"]) for j in jobs if j.job is not None)
    sweep_dir = rundir.create(root, "multirun")
    write_json(sweep_dir / "jobs.json", [{"job": n, "overrides": j.words} for n, j in enumerate(jobs)])
    print(f"{len(jobs)} jobs in {sweep_dir}", flush=True)
    import torch  # noqa: F401 - once, here; the jobs are forked

    ended: list[tuple[str, Result]] = []
    codes = []
    with Forward() as stop:
        for number, job in enumerate(jobs):
            if stop.raised:
                break
            print(f"\njob {number} of {len(jobs)}: {job.label or 'the only one'}", flush=True)
            code, result = run_one(job, sweep_dir / str(number), stop, quiet)
            codes.append(code)
            ended.append((job.label, result))
    print()
    terminal.show_jobs(ended)
    if stop.raised:
        return INTERRUPTED
    failed = {c for c in codes if c}
    if failed:
        terminal.say(f"{sum(map(bool, codes))} of {len(jobs)} jobs did not complete")
    return failed.pop() if len(failed) == 1 else FAILED if failed else 0


def _prepared(
    label: str, words: list[str], extra: list[str], config_dirs: Sequence[str], recipe: recipes.Recipe | None
) -> SweepJob:
    try:
        return SweepJob(label, [*words, *extra], prepare_job(words, config_dirs, recipe, extra), [])
    except UserError as error:
        return SweepJob(label, [*words, *extra], None, error.problems)


def run_one(job: SweepJob, run_dir: Path, stop: Forward, quiet: bool) -> tuple[int, Result]:
    """Run one job in a process of its own; its exit code and result, whatever becomes of it."""
    rundir.make(run_dir)
    if job.job is None:
        code = BAD_CONFIG
        result = Result(error="\n".join(job.problems), overrides=job.words)
        for problem in job.problems:
            terminal.say(problem)
    else:
        process: Any = multiprocessing.get_context("fork").Process(target=_child, args=(job.job, run_dir, quiet))
        process.start()
        stop.child = process.pid
        process.join()
        stop.child = None
        code = process.exitcode
        found = Result.read(run_dir)
        if found is not None:
            return code, found
        how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
        result, code = Result(error=f"the job's process was {how}", overrides=job.words), code if code > 0 else FAILED
    result.run_dir = run_dir
    result.write(run_dir)
    return code, result


def _child(job: Job, run_dir: Path, quiet: bool) -> None:
    drivetrain.STARTED = time.time()
    try:
        ended = launch.launch(job, run_dir, quiet)
        if ended.result.error:
            terminal.say(ended.result.error)
        code = ended.code
    except UserError as error:
        for problem in error.problems:
            terminal.say(problem)
        Result(error=str(error), overrides=job.composed.overrides).write(run_dir)
        code = BAD_CONFIG
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Forward:
    """While a sweep runs, a signal to it goes to the job that runs, and no further job starts."""

    def __init__(self) -> None:
        self.raised, self.child = 0, None

    def __enter__(self) -> Forward:
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.raised = number
        if self.child is not None:
            os.kill(self.child, number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
