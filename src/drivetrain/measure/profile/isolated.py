"""One look at a run's trainer, in a process of its own: nothing of it reaches the run."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.core.errors import UserError
from drivetrain.launch.job import Job
from drivetrain.run import directory

T = TypeVar("T")


def apart(look: Callable[[Any], T], job: Job) -> T:
    """What `look` returns of the job's finished trainer. Raises UserError with what went wrong there."""
    import torch  # noqa: F401 - once, here; the process is forked

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    folder = directory.create(Path(job.run.values["output_dir"]), "apart")
    sys.stdout.flush()
    sys.stderr.flush()
    process: Any = context.Process(target=_child, args=(look, job, folder, theirs))
    try:
        process.start()
        theirs.close()
        try:
            failed, told = ours.recv()
        except EOFError:
            process.join()
            raise UserError(f"the process that looked at the run ended with code {process.exitcode}") from None
        if failed:
            raise UserError(told.splitlines())
        return told
    finally:
        process.kill()
        process.join()
        directory.remove(folder)


def _child(look: Callable[[Any], T], job: Job, folder: Path, connection: Connection) -> None:
    from drivetrain.config import validate as check
    from drivetrain.core.world import World
    from drivetrain.engine import build

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        check.validate_device(job.run)
        connection.send((False, look(build.build(job.run, World(), folder, []))))
    except UserError as error:
        connection.send((True, str(error)))
    except Exception as error:
        connection.send((True, f"the run cannot be looked at: {type(error).__name__}: {error}"))
    os._exit(0)
