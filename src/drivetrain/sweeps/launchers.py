"""Runs jobs on this machine, each in a process forked from this one.

Forking has three advantages over a pool such as joblib's: torch is imported only once, jobs share no state, and a killed
job does not affect the others. A process that forks must not have used CUDA.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import BAD_CONFIG, UserError
from drivetrain.core.machine import accelerators, files, guards, process
from drivetrain.core.machine.forking import ForkedProcess
from drivetrain.core.machine.signals import STOP_SIGNALS, SignalForwarder
from drivetrain.core.typed import JsonObject
from drivetrain.launch import launcher
from drivetrain.run import directory
from drivetrain.run.result import Result
from drivetrain.sweeps.options import Ray, SubmititLocal, SubmititSlurm
from drivetrain.sweeps.store import LENGTH, StoredJob, SweepJob, one_job

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

logger = logging.getLogger(__name__)

OUTPUT = "output.txt"  # file in a job's folder: its output, if not shown


class Launcher:
    """Starts jobs and returns those that have ended. The base class waits for jobs that another process runs."""

    detached = False  # True if its jobs run on without this process

    def __init__(self, slots: int) -> None:
        self.slots = slots  # jobs at a time
        self._running: dict[Any, StoredJob] = {}  # own jobs by the handle to wait for
        self._elsewhere: list[StoredJob] = []

    def attach(self, entry: StoredJob) -> bool:
        """True if another process already runs the job: then this one waits for it instead of starting it again."""
        if directory.is_locked(entry.run_dir):
            self._elsewhere.append(entry)
            return True
        return False

    def new(self, entries: Sequence[StoredJob]) -> list[StoredJob]:
        """The jobs that no other process runs, with their folders ready."""
        found = [entry for entry in entries if not self.attach(entry)]
        for entry in found:
            entry.prepare_folder()
        return found

    def start(self, entries: Sequence[StoredJob]) -> None:
        """Start these new jobs."""
        raise NotImplementedError

    def wait(self, seconds: float, stopped: bool = False) -> list[StoredJob]:
        """The ended jobs with their results, none after a timeout in seconds. `stopped`: they were asked to stop."""
        ended = [e for e in self._elsewhere if not directory.is_locked(e.run_dir)]
        for entry in ended:
            self._elsewhere.remove(entry)
            entry.close(None, "the job's process is gone")
        for entry, code, error in self.ended(0 if ended else seconds):
            entry.close(code, error, "interrupted" if stopped else "failed")
            ended.append(entry)
        return ended

    def ended(self, seconds: float) -> Iterator[tuple[StoredJob, int | None, str]]:
        """Yield own ended jobs, their exit codes if known, and the message in case they left no result."""
        raise NotImplementedError

    def signal(self, number: int) -> None:
        """Forward a signal to the jobs."""


class Forked(Launcher):
    """One process for each job, `slots` at a time, which share the cores."""

    def __init__(self, slots: int = 1, quiet: bool = False, captured: bool = False) -> None:
        super().__init__(slots)
        self.quiet, self.captured = quiet, captured or slots > 1
        self._told = 0  # the signal sent to the jobs

    def start(self, entries: Sequence[StoredJob]) -> None:
        for entry in entries:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the job's process is known
            try:
                slot = min({*range(self.slots)} - {child.slot for child in self._running})
                new: Any = ForkedProcess(target=self._child, args=(entry, slot), parents_end=signal.SIGTERM)  # so it saves
                new.start()
                new.slot, self._running[new] = slot, entry
                if self._told:  # the signal came after the check
                    os.kill(new.pid, self._told)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def ended(self, seconds: float) -> Iterator[tuple[StoredJob, int | None, str]]:
        done = connection.wait([child.sentinel for child in self._running], seconds)
        for child in [child for child in self._running if child.sentinel in done]:
            entry = self._running.pop(child)
            child.join()
            code = child.exitcode
            how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
            yield entry, code, f"the job's process was {how}"

    def signal(self, number: int) -> None:
        self._told = number
        for child in list(self._running):
            os.kill(child.pid, number)

    def _child(self, entry: StoredJob, slot: int) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self.slots > 1:
            os.environ |= {guards.JOBS: str(self.slots), **own_device(entry, slot)}
        if self.captured:
            capture(entry)
        code = run_job(entry, self.quiet)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def capture(entry: StoredJob) -> None:
    """From now on this process writes to the job's folder."""
    log = files.descriptor(entry.run_dir / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)


def own_device(entry: StoredJob, slot: int) -> dict[str, str]:
    """The environment for a job of one device: the device of its slot, in rotation; {} for other jobs."""
    found = accelerators.find()
    variable = "ZE_AFFINITY_MASK" if found.type == "xpu" else "CUDA_VISIBLE_DEVICES"
    if found.rocm and "HIP_VISIBLE_DEVICES" in os.environ:  # ROCm prefers it to the other
        variable = "HIP_VISIBLE_DEVICES"
    visible = os.environ.get(variable)
    devices = [str(n) for n in range(accelerators.device_count())] if visible is None else visible.split(",")
    run = entry.job.job.run if entry.job.job is not None else None
    if len(devices) < 2 or run is None or not run.parallel.one_process or ":" in run.runtime.device:
        return {}
    return {variable: devices[slot % len(devices)]}


def run_job(entry: StoredJob, quiet: bool) -> int:
    """Run a job in this dedicated process; return its exit code."""
    process.restart_clock()
    try:
        job = entry.composed()
        job.attach = job.attach or _write_length
        result = launcher.launch(job, entry.run_dir, quiet)
    except UserError as error:
        for problem in error.problems:
            logger.error(problem)
        if not directory.is_locked(entry.run_dir):  # otherwise another process writes there
            Result(error=str(error), overrides=entry.job.overrides).write(entry.run_dir)
        return BAD_CONFIG
    if result.error:
        logger.error(result.error)
    return result.code


def _write_length(trainer: Trainer) -> None:
    """Write the number of the run's updates to its folder, for the progress table."""
    if trainer.parallel.world.rank == 0:
        files.write_text(trainer.run_dir / LENGTH, str(trainer.max_updates))


def run_one(job: SweepJob, run_dir: Path, signals: SignalForwarder, quiet: bool) -> Result:
    """Run one job in a new process; return its result, which exists even if it was killed."""
    entry, launcher = StoredJob(0, job, run_dir), Forked(quiet=quiet)
    with signals.to(launcher.signal):
        launcher.start(launcher.new([entry]))
        while not launcher.wait(60.0, bool(signals.raised)):
            pass
    assert entry.result is not None
    return entry.result


SUBMITTED = ".submitted"  # file in a job's folder: its submitit id
POLL_S = 0.5
SLURM_KEYS = ("partition", "account", "qos", "constraint", "array_parallelism", "setup")


@dataclass
class SubmittedJob:
    """The submitted task: one job of a sweep by its number, composed on the machine that runs it."""

    sweep: Path
    number: int
    quiet: bool
    environment: dict[str, str | None]  # variables to set, or to unset, where the job runs

    def __call__(self) -> int:
        """Run the job, from its checkpoint if it has one; return its exit code."""
        import submitit

        for name in self.environment:
            os.environ.pop(name, None)
        os.environ |= {name: value for name, value in self.environment.items() if value is not None}
        if submitit.JobEnvironment().num_tasks > 1:  # submitit's tasks are the ranks
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        return run_job(one_job(self.sweep, self.number), self.quiet)

    def checkpoint(self) -> Any:
        """Queue the job again, to resume, when its time runs out or a job of higher priority preempts it."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


class Submitit(Launcher):
    """Submits jobs and waits for them. Jobs in Slurm outlive this process; local ones end with it."""

    def __init__(
        self, option: SubmititLocal | SubmititSlurm, sweep: Path, jobs: int, quiet: bool = False, name: str = "drivetrain"
    ) -> None:
        self.detached = isinstance(option, SubmititSlurm)
        # Slurm gets all jobs as one array, and limits them to array_parallelism itself.
        super().__init__(jobs if self.detached else option.array_parallelism)
        self._option, self._sweep, self._quiet = option, sweep, quiet
        self._executor = executor(option, sweep, name)

    def attach(self, entry: StoredJob) -> bool:
        try:
            number = files.read_text(entry.run_dir / SUBMITTED)
        except OSError:
            return super().attach(entry)
        job = self._executor._executor.job_class(self._executor.folder, number)
        if not self.detached or job.done(force_check=True):
            return super().attach(entry)
        self._running[job] = entry
        return True

    def start(self, entries: Sequence[StoredJob]) -> None:
        if not entries:
            return
        environment = self._environment()
        tasks = [SubmittedJob(self._sweep.absolute(), entry.number, self._quiet, environment) for entry in entries]
        # A terminal's Ctrl-C also reaches submitit's local controllers, which would kill a job while it saves.
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

    def ended(self, seconds: float) -> Iterator[tuple[StoredJob, int | None, str]]:
        done = [job for job in self._running if job.done()]
        for job in done:
            yield self._running.pop(job), None, f"the job ended without a result ({job.state.lower()}): see {job.paths.stderr}"
        if not done:
            time.sleep(min(seconds, POLL_S))

    def signal(self, number: int) -> None:
        if not self.detached:
            for job in list(self._running):
                job._process.terminate()  # its controller forwards the signal, and waits until the job has saved

    def _environment(self) -> dict[str, str | None]:
        """The jobs' variables: their number at a time, and the devices, because submitit's executor hides all devices."""
        if self.detached:
            return {}
        visible = (
            {} if self._option.gpus_per_node is not None else {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
        )
        return {**visible, **({guards.JOBS: str(self.slots)} if self.slots > 1 else {})}


class OnRay(Launcher):
    """Gives the jobs to a Ray cluster, each as a task in a fresh process, and waits for them. They end with this process."""

    def __init__(self, option: Ray, sweep: Path, jobs: int, quiet: bool = False) -> None:
        import ray

        super().__init__(jobs)  # the cluster queues them
        self._ray, self._sweep, self._quiet = ray, sweep.absolute(), quiet
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        path = {"env_vars": {"PYTHONPATH": process.import_path()}}  # for an uninstalled checkout
        try:
            ray.init(address=option.address or "local", runtime_env=path, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"hydra.launcher.address={option.address}: no Ray cluster answers there: {_last_line(error)}"
            ) from None
        task = ray.remote(num_cpus=option.num_cpus, num_gpus=option.num_gpus, max_calls=1, max_retries=0)
        self._task = task(_on_ray)

    def start(self, entries: Sequence[StoredJob]) -> None:
        for entry in entries:
            self._running[self._task.remote(self._sweep, entry.number, self._quiet, Path.cwd())] = entry

    def ended(self, seconds: float) -> Iterator[tuple[StoredJob, int | None, str]]:
        if not self._running:
            time.sleep(seconds)
        for ref in self._ray.wait([*self._running], timeout=seconds)[0] if self._running else ():
            entry, code, error = self._running.pop(ref), None, ""
            try:
                code = self._ray.get(ref)
            except self._ray.exceptions.RayError as lost:
                error = _last_line(lost)
            yield entry, code, f"the job's task in Ray ended without a result: {error}"

    def signal(self, number: int) -> None:
        for ref in list(self._running):
            self._ray.cancel(ref, force=False)  # as Ctrl-C: the job saves


def _on_ray(sweep: Path, number: int, quiet: bool, folder: Path) -> int:
    """Run one job of a sweep in a process of Ray's, in the sweep's working directory; return its exit code."""
    os.chdir(folder)
    entry = one_job(sweep, number)
    capture(entry)
    return run_job(entry, quiet)


def executor(option: SubmititLocal | SubmititSlurm, place: Path, name: str) -> Any:
    """Return submitit's executor, which keeps its files below a folder."""
    import submitit

    os.environ["PYTHONPATH"] = process.import_path()  # for jobs of an uninstalled checkout
    cluster = "slurm" if isinstance(option, SubmititSlurm) else "local"
    made = submitit.AutoExecutor(place.absolute() / "submitit" / "%j", cluster=cluster)
    made.update_parameters(name=name, **_parameters(option))
    return made


def _parameters(option: SubmititLocal | SubmititSlurm) -> JsonObject:
    """The keys under the names of submitit's AutoExecutor."""
    if isinstance(option, SubmititLocal):
        given = {k: v for k, v in asdict(option).items() if k not in ("array_parallelism", "setup")}
        return {**given, "local_setup": option.setup}
    given = {f"slurm_{k}" if k in SLURM_KEYS else k: v for k, v in asdict(option).items()}
    return {k: v for k, v in given.items() if v not in (None, [])}


def _last_line(error: Exception) -> str:
    lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
