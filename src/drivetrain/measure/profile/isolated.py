"""Runs a probe on a run's trainer in a process of its own, so that nothing of it affects the run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.core.errors import UserError
from drivetrain.core.forking import ForkedProcess
from drivetrain.core.signals import ended_by_signals
from drivetrain.launch.job import Job
from drivetrain.run import directory

T = TypeVar("T")


def run_isolated(probe: Callable[[Any], T], job: Job) -> T:
    """Build the job's trainer in a forked process, and return `probe(trainer)`. Raises UserError with what went wrong."""
    import torch  # noqa: F401 - imported once here, because the process is forked

    connection, child_end = multiprocessing.Pipe()
    folder = directory.create(Path(job.run.values["output_dir"]), "probe")
    sys.stdout.flush()
    sys.stderr.flush()
    process: Any = ForkedProcess(target=_child, args=(probe, job, folder, child_end))
    with ended_by_signals():  # else SIGTERM would leave the process behind
        try:
            process.start()
            child_end.close()
            try:
                error, value = connection.recv()
            except EOFError:
                process.join()
                raise UserError(f"the process that profiled the run ended with code {process.exitcode}") from None
            if error is not None:
                raise UserError(error.splitlines())
            return value  # type: ignore[no-any-return]
        finally:
            process.kill()
            process.join()
            directory.remove(folder)


def _child(probe: Callable[[Any], T], job: Job, folder: Path, connection: Connection) -> None:
    """Send (error, value) of the probe, one of which is None."""
    from drivetrain.config import validate
    from drivetrain.core.context import BuildContext
    from drivetrain.core.world import World
    from drivetrain.engine import build

    for number in (signal.SIGTERM, signal.SIGINT):  # the parent's handlers are the parent's
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        validate.validate_device(job.run)
        connection.send((None, probe(build.build(BuildContext(job.run, World(), folder), []))))
    except UserError as error:
        connection.send((str(error), None))
    except Exception as error:
        connection.send((f"the run cannot be profiled: {type(error).__name__}: {error}", None))
    os._exit(0)
