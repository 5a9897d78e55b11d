"""One run from its words to its result: compose, check, make its directory, start its ranks, write what it came to."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain import check, environment, rundir, terminal, trial
from drivetrain import compose as composing
from drivetrain import recipe as recipes
from drivetrain.compose import Composed
from drivetrain.errors import BAD_CONFIG, EXIT_OF_STATUS, FAILED, INTERRUPTED, Diverged, Interrupted, UserError
from drivetrain.measure.result import Result, write_json
from drivetrain.plan import World
from drivetrain.spec import Run

RESULT_TO = "DRIVETRAIN_RESULT_TO"  # a file to which a child process writes where its run lies


@dataclass
class Job:
    """A run that was found good, before it has a directory."""

    composed: Composed
    run: Run
    config_hash: str
    operators: set[str]
    run_dir: Path | None = None  # set for a run that goes on
    checkpoint: Path | None = None
    said: list[str] = field(default_factory=list)


@dataclass
class Ended:
    """How a run ended."""

    result: Result
    code: int


def prepare(overrides: Sequence[str], config_dirs: Sequence[str] = (), in_sweep: bool = False) -> Job:
    """Words → a checked job. Raises UserError with all problems; writes nothing and imports no torch."""
    asked = dict(word.partition("=")[::2] for word in overrides if "=" in word)
    going_on = asked.get("resume", "null").strip("'\"")
    words = [w for w in overrides if not w.startswith("resume=")]
    if going_on in ("null", "", "auto"):
        composed = composing.compose(words, config_dirs)
        if composed.recipe is not None and composed.recipe.sweep and not in_sweep:
            raise UserError(
                f"recipe {composed.recipe.name} is a sweep: run it by `python -m src.train recipe={composed.recipe.name}`"
            )
        job = checked(composed)
        return _newest_unfinished(job) if going_on == "auto" else job
    return _resumed(Path(going_on), words, config_dirs)


def checked(composed: Composed, own: bool = False) -> Job:
    run = check.check(composed)
    if not own:  # the recipe of a run of ours names what its operator chose
        check.recipe_may_not(composed, run)
    operators = check.operators(run)
    said = composed.said + [line for part in check.parts(run) for line in part.advise(run)]
    return Job(composed, run, composing.config_hash(composed, operators), operators, said=said)


def _resumed(run_dir: Path, words: list[str], config_dirs: Sequence[str]) -> Job:
    """The job of `resume=<run dir>`: the run's own recipe and operator's settings, then the words beside it."""
    if not (run_dir / "recipe.yaml").is_file() or not (run_dir / "environment.json").is_file():
        raise UserError(
            f"resume={run_dir} is no run's directory (no recipe.yaml in it): name one such as outputs/<date>/<time>-<id>"
        )
    try:
        facts = json.loads((run_dir / "environment.json").read_text())
    except ValueError:
        raise UserError(f"resume={run_dir}: its environment.json is damaged") from None
    own = [f"{k}={composing.as_word(v)}" for k, v in facts.get("operator", {}).items()]
    given = {w.partition("=")[0] for w in words}
    own = [w for w in own if w.partition("=")[0] not in given]
    job = checked(composing.compose([*own, *words], config_dirs, base=recipes.read(run_dir / "recipe.yaml")), own=True)
    job.composed.overrides = words
    different = composing.differences(check.config_file(run_dir / "config.yaml"), job.composed.plain, job.operators)
    if different and not job.run.values["resume_changed"]:
        raise UserError(
            [f"resume={run_dir}: the config differs from the run's, and only its length may: {'; '.join(different)}."
             " Say resume_changed=true to go on all the same"]
        )  # fmt: skip
    job.said += [f"resumed with a changed config: {line}" for line in different]
    return _from_newest(job, run_dir)


def _from_newest(job: Job, run_dir: Path) -> Job:
    from drivetrain import manifest

    job.run_dir = run_dir
    job.checkpoint, complaints = manifest.newest_valid(run_dir)
    job.said += complaints
    if job.checkpoint is None:
        job.said.append(f"{run_dir} has no checkpoint that verifies: it starts from the beginning")
    else:
        job.said.append(f"going on from {job.checkpoint}")
    return job


def _newest_unfinished(job: Job) -> Job:
    for run_dir in rundir.newest_first(Path(job.run.values["output_dir"])):
        result = Result.read(run_dir)
        if result is not None and result.status in ("completed", "diverged"):
            continue
        try:
            same = json.loads((run_dir / "environment.json").read_text()).get("config_hash") == job.config_hash
        except (OSError, ValueError):
            continue
        if same and not rundir.is_held(run_dir):
            return _from_newest(job, run_dir)
    job.said.append("resume=auto: no unfinished run of this config: a new one starts")
    return job


def train(overrides: list[str]) -> Result:
    """`drivetrain.train`: this process trains a run of one rank; several ranks start from a process of their own."""
    drivetrain.STARTED = time.time()
    job = prepare(overrides)
    if not job.run.parallel.distributed or "WORLD_SIZE" in os.environ:
        return launch(job).result
    # The ranks are forked from a process that has run nothing of torch; this one may have.
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "run_dir"
        command = [sys.executable, "-m", "drivetrain", "train", *overrides]
        path = os.pathsep.join([str(Path(drivetrain.__file__).parents[1]), *sys.path])
        env = {**os.environ, RESULT_TO: str(told), "PYTHONPATH": path}
        done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(done.stderr)
        result = Result.read(Path(told.read_text())) if told.exists() else None
    if result is None:
        raise UserError(done.stderr.strip().splitlines() or [f"the run ended with code {done.returncode}"])
    return result


def launch(job: Job, run_dir: Path | None = None, quiet: bool = False) -> Ended:
    """Run a job to its end in `run_dir`, or in a new directory. Raises UserError where it cannot begin, and leaves nothing."""
    world = _world_of_environment()
    ranks = job.run.parallel.ranks()
    check.verify(job.run)
    if world.rank != 0:
        return Ended(*_rank(job, world, Path(os.devnull), quiet=True))
    if job.checkpoint is None and world.size == 1:  # a checkpoint brings with it what was settled
        words, dirs = job.composed.overrides, job.composed.config_dirs
        settled = job.run.batch.settle(lambda sizes, limit: trial.fitting(words, dirs, sizes, limit), ranks)
        if settled:
            job.said.append(settled)
    run_dir = job.run_dir or run_dir
    if is_new := run_dir is None:
        run_dir = rundir.create(Path(job.run.values["output_dir"]))
    with rundir.held(run_dir):
        ended = _held_run(job, run_dir, world, ranks, quiet)
    if ended.code == BAD_CONFIG and not ended.result.updates and is_new:
        rundir.remove(run_dir)  # it never was a run: nothing is left of it
        raise UserError(str(ended.result.error).splitlines())
    return ended


def _held_run(job: Job, run_dir: Path, world: World, ranks: int, quiet: bool) -> Ended:
    _describe(job, run_dir)
    if RESULT_TO in os.environ:
        Path(os.environ[RESULT_TO]).write_text(str(run_dir.resolve()))
    for line in job.said:
        terminal.say(line)
    if not quiet:
        terminal.show_recipe(job.composed)
    (run_dir / "result.json").unlink(missing_ok=True)  # of the part before a resume
    if job.run.parallel.distributed and "WORLD_SIZE" not in os.environ:
        from drivetrain import elastic

        result, code = elastic.run(job, run_dir, ranks, quiet)
    else:
        result, code = _rank(job, world, run_dir, quiet)
    result.wall_s = time.time() - drivetrain.STARTED
    result.run_dir = run_dir
    result.write(run_dir)
    return Ended(result, code)


def _describe(job: Job, run_dir: Path) -> None:
    """recipe.yaml, config.yaml and environment.json; those of a run that goes on follow its new length."""
    from omegaconf import OmegaConf

    (run_dir / "recipe.yaml").write_text(composing.to_recipe(job.composed, job.operators))
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(job.composed.config))
    operator = composing.operator_values(job.composed, job.operators)
    about = environment.describe(job.composed.overrides, job.config_hash, composing.operator_words(operator, job.composed))
    write_json(run_dir / "environment.json", about)


def _world_of_environment() -> World:
    """This process's place as torchrun or Slurm gave it; alone where nothing did."""
    env = os.environ
    if "WORLD_SIZE" not in env:
        return World()
    size, local = int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0"))
    return World(int(env["RANK"]), size, local, int(env.get("LOCAL_WORLD_SIZE", size)))


def _rank(job: Job, world: World, run_dir: Path, quiet: bool) -> tuple[Result, int]:
    """Build, restore and fit one rank; whatever happens becomes a result and an exit code."""
    result = Result(
        overrides=[environment.redact(w) for w in job.composed.overrides],
        config_hash=job.config_hash,
        world_size=world.size,
    )
    sinks: list[Any] = []
    trainer = None
    began = time.perf_counter()
    try:
        trainer = _build(job, world, run_dir, sinks, quiet)
        trainer.fit()
        result.status = "completed"
        code = EXIT_OF_STATUS["completed"]
    except UserError as error:
        result.error, code = str(error), BAD_CONFIG
    except Diverged as error:
        result.status, result.error, code = "diverged", str(error), EXIT_OF_STATUS["diverged"]
    except (Interrupted, KeyboardInterrupt) as error:
        saved = isinstance(error, Interrupted) and error.saved
        kept = saved or any((run_dir / "checkpoints").glob("[0-9]*"))
        result.status, code = "interrupted", INTERRUPTED if kept else FAILED
        result.error = (str(error) or "stopped by the keyboard") + (
            f": go on with resume={run_dir}" if kept else ": saving=none kept nothing" if not job.run.saving.active else ""
        )
    except Exception as error:  # the one place where a bug becomes a line and a log
        code, result.error = (
            FAILED,
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
        )
        if run_dir.is_dir():
            with (run_dir / "log.txt").open("a") as log:
                log.write(traceback.format_exc())
            result.error += f" (traceback in {run_dir / 'log.txt'})"
        else:
            traceback.print_exc()
    if trainer is not None:
        _measured(result, trainer, time.perf_counter() - began, job)
    for sink in sinks:
        sink.close()
    job.run.precision.stop()
    _report(job.run.debug.stop(), world, run_dir)
    if trainer is not None and code == EXIT_OF_STATUS["completed"]:
        job.run.parallel.stop()  # a failed rank must not wait here for the others
    return result, code


def _report(lines: list[str], world: World, run_dir: Path) -> None:
    """What debugging found: to the user and to debug.txt."""
    if world.rank != 0 or not lines:
        return
    for line in lines:
        terminal.say(line)
    with contextlib.suppress(OSError):  # a full disk takes the copy, not the run
        (run_dir / "debug.txt").write_text("".join(line + "\n" for line in lines))


def _build(job: Job, world: World, run_dir: Path, sinks: list[Any], quiet: bool) -> Any:
    from drivetrain import build, resume
    from drivetrain.logger import Files

    trainer = build.build(job.run, world, run_dir, sinks)
    if job.checkpoint is not None:
        trainer.restore(*resume.load(job.checkpoint))
    if world.rank == 0:
        loggers = job.run.logger
        if not any(isinstance(logger, Files) for logger in loggers):
            loggers = [Files(), *loggers]  # always: resume and report read them
        sinks += loggers
        for logger in loggers:
            logger.start(run_dir, trainer.progress.updates)
        if not quiet:
            sinks.append(terminal.Progress(trainer.max_updates, trainer.epochs))
            for line in trainer.said:
                sinks[-1].say(line)
    return trainer


def _measured(result: Result, trainer: Any, seconds: float, job: Job) -> None:
    """Fill in what the trainer knows."""
    from drivetrain.runtime import peak_memory

    progress, clock = trainer.progress, trainer.clock
    result.metrics = {"final": progress.final, "best": progress.best}
    result.updates = progress.updates
    result.epochs = progress.epoch
    if progress.window:
        result.epochs += progress.window / trainer.batch.updates(
            len(trainer.train_data.source), progress.epoch, trainer.drop_last
        )
    result.device = trainer.device.type
    result.peak_memory_bytes = peak_memory(trainer.device)
    result.time_to_first_step_s = clock.to_first_step
    if (steady := clock.steady()) is not None:
        seconds, result.data_wait_fraction = steady
        result.samples_per_second = (progress.samples - clock.first_samples) / seconds
    if (percentiles := clock.percentiles()) is not None:
        result.step_ms_p50, result.step_ms_p95 = percentiles
    result.compile_s = job.run.compile.seconds()
