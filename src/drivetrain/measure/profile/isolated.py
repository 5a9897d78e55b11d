"""Runs a probe on a run's trainer in a process of its own, so that nothing of it affects the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.core.errors import UserError
from drivetrain.core.forking import forked
from drivetrain.core.signals import ended_by_signals
from drivetrain.launch.job import Job
from drivetrain.run import directory

T = TypeVar("T")


def run_isolated(probe: Callable[[Any], T], job: Job) -> T:
    """Build the job's trainer in a forked process, and return `probe(trainer)`. Raises UserError with what went wrong."""
    import torch  # noqa: F401 - imported once here, because the process is forked

    folder = directory.create(Path(job.run.values["output_dir"]), "probe")
    try:
        with ended_by_signals(), forked(_child, probe, job, folder) as (process, connection):
            try:
                error, value = connection.recv()
            except EOFError:
                process.join()
                raise UserError(f"the process that profiled the run ended with code {process.exitcode}") from None
    finally:
        directory.remove(folder)
    if error is not None:
        raise UserError(error.splitlines())
    return value  # type: ignore[no-any-return]


def _child(probe: Callable[[Any], T], job: Job, folder: Path, connection: Connection) -> None:
    """Send (error, value) of the probe, one of which is None."""
    from drivetrain.config import validate
    from drivetrain.core.context import BuildContext
    from drivetrain.core.world import World
    from drivetrain.engine import build

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        validate.validate_device(job.run)
        connection.send((None, probe(build.build(BuildContext(job.run, World(), folder), []))))
    except UserError as error:
        connection.send((str(error), None))
    except Exception as error:
        connection.send((f"the run cannot be profiled: {type(error).__name__}: {error}", None))
    os._exit(0)
