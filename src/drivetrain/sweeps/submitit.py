"""Runs jobs by submitit: in Slurm, or on this machine in the same way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.core import cpus, files, process
from drivetrain.core.errors import UserError
from drivetrain.core.paths import add_import_paths
from drivetrain.sweeps.forked import Launcher, run_job
from drivetrain.sweeps.options import SubmititLocal, SubmititSlurm
from drivetrain.sweeps.store import Entry, one_job, read

SUBMITTED = ".submitted"  # file in a job's folder: its submitit id
POLL_S = 0.5
SLURM_KEYS = ("partition", "account", "qos", "constraint", "array_parallelism", "setup")


@dataclass
class Task:
    """What is submitted: one job of a sweep by its number, which is composed where it runs."""

    sweep: Path
    number: int
    quiet: bool
    devices: str | None  # CUDA_VISIBLE_DEVICES where the job was submitted
    own_devices: bool  # the launcher gives it devices of its own
    jobs_per_machine: int  # at a time

    def __call__(self) -> int:
        """Run the job, from its checkpoint if it has one; return its exit code."""
        import submitit

        if not self.own_devices:  # submitit's local executor hides all devices
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            os.environ |= {} if self.devices is None else {"CUDA_VISIBLE_DEVICES": self.devices}
        if self.jobs_per_machine > 1:
            os.environ[cpus.JOBS] = str(self.jobs_per_machine)
        if submitit.JobEnvironment().num_tasks > 1:  # submitit's tasks are the ranks
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        add_import_paths(read(self.sweep)["config_dirs"])
        return run_job(one_job(self.sweep, self.number), self.quiet)

    def checkpoint(self) -> Any:
        """Queue the job again, to resume, when its time runs out or a job of higher priority preempts it."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class Submitit(Launcher):
    """Submits jobs and waits for them. Jobs in Slurm run on when this process ends; local ones end with it."""

    def __init__(
        self, option: SubmititLocal | SubmititSlurm, sweep: Path, jobs: int, quiet: bool = False, name: str = "drivetrain"
    ) -> None:
        import submitit

        self.detached = isinstance(option, SubmititSlurm)
        # Slurm gets all jobs as one array, and limits them to array_parallelism itself.
        super().__init__(jobs if self.detached else option.array_parallelism)
        self._option, self._sweep, self._quiet = option, sweep, quiet
        folder = sweep.absolute() / "submitit" / "%j"
        self._executor = submitit.AutoExecutor(folder, cluster="slurm" if self.detached else "local")
        self._executor.update_parameters(name=name, **_parameters(option))
        self._running: dict[Any, Entry] = {}
        # For jobs of a checkout that is not installed.
        os.environ["PYTHONPATH"] = process.import_path()

    def attach(self, entry: Entry) -> bool:
        try:
            number = files.read_text(entry.run_dir / SUBMITTED)
        except OSError:
            return super().attach(entry)
        job = self._executor._executor.job_class(self._executor.folder, number)  # type: ignore[attr-defined]
        if not self.detached or job.done(force_check=True):
            return super().attach(entry)
        self._running[job] = entry
        return True

    def start(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        tasks = [self._task(entry) for entry in entries]
        # A terminal's Ctrl-C also reaches submitit's local controllers, which would kill a job that is saving.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with self._executor.batch():
                jobs = [self._executor.submit(task) for task in tasks]
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            raise UserError(f"the jobs could not be submitted: {_last_line(error)}") from None
        finally:
            signal.signal(signal.SIGINT, before)
        for job, entry in zip(jobs, entries, strict=True):
            files.write_text(entry.run_dir / SUBMITTED, job.job_id)
            self._running[job] = entry

    def wait(self, seconds: float, stopped: bool = False) -> list[Entry]:
        ended = super().wait(seconds, stopped)
        for job in [job for job in self._running if job.done()]:
            entry = self._running.pop(job)
            error = f"the job ended without a result ({job.state.lower()}): see {job.paths.stderr}"
            entry.close(None, error, "interrupted" if stopped else "failed")
            ended.append(entry)
        if not ended:
            time.sleep(min(seconds, POLL_S))
        return ended

    def signal(self, number: int) -> None:
        if not self.detached:
            for job in list(self._running):
                job._process.terminate()  # its controller forwards the signal, and waits until the job has saved

    def _task(self, entry: Entry) -> Task:
        jobs_per_machine = 1 if self.detached else self.slots
        own_devices = self.detached or self._option.gpus_per_node is not None
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        return Task(self._sweep.absolute(), entry.number, self._quiet, devices, own_devices, jobs_per_machine)


def _parameters(option: SubmititLocal | SubmititSlurm) -> dict[str, Any]:
    """The keys as submitit's AutoExecutor names them."""
    if isinstance(option, SubmititLocal):
        given = {k: v for k, v in asdict(option).items() if k not in ("array_parallelism", "setup")}
        return {**given, "local_setup": option.setup}
    given = {f"slurm_{k}" if k in SLURM_KEYS else k: v for k, v in asdict(option).items()}
    return {k: v for k, v in given.items() if v not in (None, [])}


def _last_line(error: Exception) -> str:
    lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
