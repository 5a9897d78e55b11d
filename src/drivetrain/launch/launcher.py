"""One job to its result: its directory, its ranks, and what it came to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.config import validate as check
from drivetrain.core import process
from drivetrain.core.context import BuildContext
from drivetrain.core.errors import (
    BAD_CONFIG,
    EXIT_OF_STATUS,
    FAILED,
    GONE,
    INTERRUPTED,
    Diverged,
    Interrupted,
    UserError,
    is_of_others,
)
from drivetrain.core.files import write_json
from drivetrain.core.signals import StopFlag
from drivetrain.core.world import World
from drivetrain.launch import batch_probe
from drivetrain.launch.job import Job, prepare
from drivetrain.parallel import launched, world_of_environment
from drivetrain.run import directory, environment, identity
from drivetrain.run.result import Result
from drivetrain.ui import terminal

LAST_WRITE_S = 30.0  # for a checkpoint that is being written when the run fails
RESULT_TO = "DRIVETRAIN_RESULT_TO"  # a file to which a child process writes where its run lies


@dataclass
class Ended:
    """How a run ended."""

    result: Result
    code: int


def train(overrides: list[str]) -> Result:
    """`drivetrain.train`: this process trains a run of one rank; several ranks start from a process of their own."""
    process.restart_clock()
    job = prepare(overrides)
    if not job.run.parallel.distributed or launched() is not None:
        return launch(job).result
    # The ranks are forked from a process that has run nothing of torch; this one may have.
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "run_dir"
        command = [sys.executable, "-m", "drivetrain", "train", *overrides]
        path = os.pathsep.join([str(process.PACKAGE.parent), *sys.path])
        env = {**os.environ, RESULT_TO: str(told), "PYTHONPATH": path}
        done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(done.stderr)
        result = Result.read(Path(told.read_text())) if told.exists() else None
    if result is None:
        told_why = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        raise UserError(told_why or [f"the run ended with code {done.returncode}"])
    return result


def launch(job: Job, run_dir: Path | None = None, quiet: bool = False) -> Ended:
    """Run a job to its end in `run_dir`, or in a new directory. Raises UserError where it cannot begin, and leaves nothing."""
    world = world_of_environment()
    ranks = job.run.parallel.ranks()
    check.verify(job.run)
    if world.rank != 0:
        with StopFlag() as stop:
            return Ended(*_rank(job, world, Path(os.devnull), stop, quiet=True))
    if job.checkpoint is None and world.size == 1:  # a checkpoint brings with it what was settled
        words, dirs = job.composed.overrides, job.composed.config_dirs
        fitting = lambda sizes, limit: batch_probe.fitting(words, dirs, sizes, limit)  # noqa: E731
        job.run.parts["batch"] = job.run.batch.autotune(fitting, ranks)
    run_dir = job.run_dir or run_dir
    if job.run.parallel.nnodes > 1 and launched() is None:
        return _on_several(job, run_dir or directory.new(Path(job.run.values["output_dir"])), quiet)
    if is_new := run_dir is None:
        run_dir = directory.create(Path(job.run.values["output_dir"]))
    with directory.held(run_dir):
        ended = _held_run(job, run_dir, world, quiet)
    if ended.code == BAD_CONFIG and not ended.result.updates and is_new:
        directory.remove(run_dir)  # it never was a run: nothing is left of it
        raise UserError(str(ended.result.error).splitlines())
    return ended


def _on_several(job: Job, run_dir: Path, quiet: bool) -> Ended:
    """This machine's part of a run on several: the process that becomes rank 0 makes the run's directory, where it is."""
    from drivetrain.launch import elastic

    _announce(job, quiet)
    directory.may_be_made(run_dir)

    def written(result: Result) -> None:
        result.wall_s = time.time() - process.started
        if result.run_dir is not None:
            result.write(run_dir)
            if RESULT_TO in os.environ:
                Path(os.environ[RESULT_TO]).write_text(str(run_dir))

    def end(result: Result, code: int) -> int:
        written(result)
        if code:
            terminal.say(f"error: {result.error}")
        sys.stdout.flush()
        return code

    result, code = elastic.run(job, run_dir, quiet, end)
    if code == BAD_CONFIG and not result.updates:
        if job.run_dir is None and run_dir.is_dir():
            directory.remove(run_dir)
        raise UserError(str(result.error).splitlines())
    written(result)
    if result.run_dir is None and not code:
        terminal.say("this machine's ranks are done; the run's directory is where rank 0 is")
    return Ended(result, code)


def _held_run(job: Job, run_dir: Path, world: World, quiet: bool) -> Ended:
    _describe(job, run_dir)
    if RESULT_TO in os.environ:
        Path(os.environ[RESULT_TO]).write_text(str(run_dir))
    _announce(job, quiet)
    (run_dir / "result.json").unlink(missing_ok=True)  # of the part before a resume
    if job.run.parallel.distributed and launched() is None:
        from drivetrain.launch import elastic

        result, code = elastic.run(job, run_dir, quiet)
    else:
        with StopFlag() as stop:  # from now on a signal is an interruption, with a result
            result, code = _rank(job, world, run_dir, stop, quiet)
        if world.size > 1:
            from drivetrain.launch import elastic

            result, code = elastic.of_other_launcher(result, code, run_dir)
    result.wall_s = time.time() - process.started
    result.run_dir = run_dir
    result.write(run_dir)
    return Ended(result, code)


def _announce(job: Job, quiet: bool) -> None:
    for line in job.said:
        terminal.say(line)
    if not quiet:
        terminal.show_recipe(job.composed)


def _describe(job: Job, run_dir: Path) -> None:
    """recipe.yaml, config.yaml and environment.json; those of a run that goes on follow its new length."""
    from omegaconf import OmegaConf

    (run_dir / "recipe.yaml").write_text(identity.to_recipe(job.composed, job.machine_local_keys))
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(job.composed.config))
    operator = identity.operator_values(job.composed, job.machine_local_keys)
    about = environment.describe(job.composed.overrides, job.config_hash, identity.operator_words(operator, job.composed))
    about["config_dirs"] = [str(Path(folder).resolve()) for folder in job.composed.config_dirs]
    write_json(run_dir / "environment.json", about)


def _rank(job: Job, world: World, run_dir: Path, stop: StopFlag, quiet: bool) -> tuple[Result, int]:
    """Build, restore and fit one rank; whatever happens becomes a result and an exit code."""
    result = Result(
        overrides=[environment.redact(w) for w in job.composed.overrides],
        config_hash=job.config_hash,
        world_size=world.size,
    )
    sinks: list[Any] = []
    trainer = None
    began = time.perf_counter()
    config = identity.without_operators(job.composed, job.machine_local_keys)
    context = BuildContext(job.run, world, run_dir, job.config_hash, config)
    try:
        trainer = _build(job, context, sinks, quiet)
        trainer.fit(stop)
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
    except (Exception, SystemExit) as error:  # the one place where a bug becomes a line and a log
        code, result.error = (
            FAILED,
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
        )
        result.error += job.run.compile.advice(error)
        if run_dir.is_dir():
            with (run_dir / "log.txt").open("a") as log:
                log.write(traceback.format_exc())
            result.error += f" (traceback in {run_dir / 'log.txt'})"
        elif is_of_others(result.error):
            terminal.say(f"rank {world.rank}: {GONE}")
        else:
            traceback.print_exc()
    if trainer is not None:
        trainer.writer.finish(LAST_WRITE_S)
        _measured(result, trainer, time.perf_counter() - began, job)
        _count_skipped(result, trainer, world, run_dir)
    for sink in sinks:
        sink.close()
    context.on_exit.close()
    _report(context.findings(), world, run_dir)
    if trainer is not None and code == EXIT_OF_STATUS["completed"]:
        trainer.parallel.shutdown()  # a failed rank must not wait here for the others
    return result, code


def _report(lines: list[str], world: World, run_dir: Path) -> None:
    """What debugging found: to the user and to debug.txt."""
    if world.rank != 0 or not lines:
        return
    for line in lines:
        terminal.say(line)
    with contextlib.suppress(OSError):  # a full disk takes the copy, not the run
        (run_dir / "debug.txt").write_text("".join(line + "\n" for line in lines))


def _build(job: Job, context: BuildContext, sinks: list[Any], quiet: bool) -> Any:
    from drivetrain.engine import build
    from drivetrain.logger import Files

    trainer = build.build(context, sinks)
    world, run_dir = context.world, context.run_dir
    if (checkpoint := trainer.parallel.broadcast_object(job.checkpoint)) is not None:
        trainer.restore(*_read(checkpoint, trainer.parallel))
    if job.attach is not None:
        job.attach(trainer)
    if world.rank == 0:
        loggers = job.run.logger
        if not any(isinstance(logger, Files) for logger in loggers):
            loggers = [Files(), *loggers]  # always: resume and report read them
        sinks += loggers
        for logger in loggers:
            logger.start(run_dir, trainer.progress.updates)
        if not quiet:
            sinks.append(terminal.Progress(trainer.max_updates, trainer.epochs))
    return trainer


def _read(checkpoint: Path, parallel: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint, on every rank: read where all can, else sent by rank 0, as on machines that share no file system."""
    from drivetrain.saving import checkpoint_io

    here = parallel.gather_object(checkpoint.is_dir())
    if parallel.broadcast_object(all(here)):
        return checkpoint_io.load(checkpoint, parallel.empty_shard)
    read = checkpoint_io.load(checkpoint) if parallel.world.rank == 0 else None
    return parallel.broadcast_object(read)  # type: ignore[no-any-return]


def _measured(result: Result, trainer: Any, seconds: float, job: Job) -> None:
    """Fill in what the trainer knows."""
    from drivetrain.core.device import peak_memory

    progress, clock = trainer.progress, trainer.timer
    result.metrics = {"final": progress.final, "best": progress.best}
    result.updates = progress.updates
    result.epochs = progress.epoch
    if progress.window:
        result.epochs += progress.window / trainer.batch.updates(
            len(trainer.train_data.source), progress.epoch, trainer.drop_last
        )
    result.device, result.device_name = trainer.device.type, environment.device_name(trainer.device)
    result.peak_memory_bytes = peak_memory(trainer.device)
    result.time_to_first_step_s = clock.to_first_step
    if (steady := clock.steady()) is not None:
        seconds, result.data_wait_fraction = steady
        result.samples_per_second = (progress.samples - clock.first_samples) / seconds
    if (percentiles := clock.percentiles()) is not None:
        result.step_ms_p50, result.step_ms_p95 = percentiles
    result.compile_s = trainer.compile_seconds()


def _count_skipped(result: Result, trainer: Any, world: World, run_dir: Path) -> None:
    """How many distinct samples could not be read, on all ranks of a run that got to its end; their names go to the log."""
    sources = [pipeline.source for pipeline in (trainer.train_data, trainer.evaluator.data)]
    if not any(hasattr(source, "skipped") for source in sources):
        return
    mine = [name for source in sources if hasattr(source, "skipped") for name in source.skipped()]
    ranks = trainer.parallel.gather_object(mine) if result.status == "completed" else [mine]
    names = sorted({name for rank in ranks for name in rank})
    result.skipped_samples = len(names)
    if world.rank == 0 and names:
        terminal.say(f"{len(names)} samples could not be read and were skipped: {names[0]}{' …' if len(names) > 1 else ''}")
        with contextlib.suppress(OSError), (run_dir / "log.txt").open("a") as log:
            log.writelines(f"skipped: {name}\n" for name in names)
