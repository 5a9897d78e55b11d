"""Records a run's first updates in processes of its own: an ordinary run, with its ranks, that makes a few updates."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.forking import forked
from drivetrain.core.signals import ended_by_signals
from drivetrain.launch.job import Job
from drivetrain.measure.certify.trace import Trace
from drivetrain.run import directory
from drivetrain.run.result import Result


def run_recorded(job: Job, updates: int, **look: Any) -> Trace:
    """Return the trace of a run's first updates; `look` holds further fields of record.Look. Raises UserError."""
    import torch  # noqa: F401 - imported once here, because the processes are forked

    folder = directory.create(Path(job.run.values["output_dir"]), "certify")
    try:
        with ended_by_signals(), forked(_child, job, {"updates": updates, **look}, folder) as (process, connection):
            try:
                found = connection.recv()
            except EOFError:
                process.join()
                result = Result.read(folder)
                raise UserError((result and result.error) or f"a run ended with code {process.exitcode}") from None
    finally:
        directory.remove(folder)
    if isinstance(found, Trace):
        return found
    raise UserError(found)


def _child(job: Job, look: dict[str, Any], folder: Path, connection: Connection) -> None:
    """The process of a run. Its rank 0 sends the trace; an error before it is sent as lines."""
    from drivetrain.launch import launcher
    from drivetrain.measure.certify import shadow
    from drivetrain.measure.certify.record import Look

    log = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    looked = Look.at(job.run, **look)
    try:
        run = job.run
        if looked.float64:
            run = shadow.widened_run(run) if looked.techniques else shadow.shadow_of(run)
        ended = launcher.launch(replace(job, run=run, work=_recording(looked, connection)), folder, quiet=True)
        if ended.code:
            connection.send([str(ended.result.error).partition(" (traceback in")[0]])  # that file is removed
    except UserError as error:
        connection.send(error.problems)
    except Exception as error:
        connection.send([f"the run cannot be certified: {type(error).__name__}: {error}"])
    os._exit(0)


def _recording(look: Any, connection: Connection) -> Callable[[Any], None]:
    def work(trainer: Any) -> None:
        from drivetrain.measure.certify.record import record

        trace = record(trainer, look)
        if trace is not None:
            connection.send(trace)

    return work
