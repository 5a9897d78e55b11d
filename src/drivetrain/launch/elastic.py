"""The ranks of this machine, started by torch's elastic launcher; each machine of a run starts its own from the same command."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from drivetrain.core.errors import BAD_CONFIG, DIVERGED, FAILED, INTERRUPTED, UserError, is_peer_failure
from drivetrain.core.machine import files, process
from drivetrain.core.machine.files import write_json
from drivetrain.core.machine.forking import disown_garbage, end_openmp_threads
from drivetrain.core.machine.open_files import apart_after_fork
from drivetrain.core.machine.signals import StopFlag, comes_again, handled_by
from drivetrain.core.typed import JsonObject
from drivetrain.launch.job import Job
from drivetrain.launch.worker import run_rank
from drivetrain.parallel.environment import world_of_environment
from drivetrain.run import directory
from drivetrain.run.directory import RunDirHandle
from drivetrain.run.result import Result
from drivetrain.saving import manifest
from drivetrain.ui import logs

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

    from drivetrain.parallel.process_group import ProcessGroupStrategy
from drivetrain.launch.addresses import (
    can_listen,
    is_torch_store,
    local_address_towards,
    own_address,
    use_interface_of,
    wait_for_listener,
)
from drivetrain.launch.heartbeat import HeartbeatMonitor, RankResults, begun_ranks, process_state, read_results, start_heartbeat

TORCH_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
TELLS_OF_RANKS = "torch.distributed.elastic.multiprocessing.api"

P = ParamSpec("P")
T = TypeVar("T")


class FailureRecorder(logging.Handler):
    """A context manager that silences torch's launcher; `reason` explains the latest failure of ranks.

    The launcher restarts all ranks by itself and reports that only in its log, so a log record triggers the search.
    """

    def __init__(self, folder: Path, monitor: HeartbeatMonitor) -> None:
        super().__init__()
        self.folder, self.reason = folder, ""
        self._monitor, self._undo = monitor, contextlib.ExitStack()

    def __enter__(self) -> FailureRecorder:
        for logger in map(logging.getLogger, TORCH_LOGGERS):  # and their child loggers, whose records arrive here too
            self._undo.callback(setattr, logger, "propagate", logger.propagate)
            self._undo.callback(logger.removeHandler, self)
            logger.propagate = False
            logger.addHandler(self)
        logging.getLogger(TELLS_OF_RANKS).setLevel(logging.ERROR)  # whatever LOGLEVEL says
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Read why ranks failed; a complaint about a lost peer counts only if no other reason is known."""
        if record.levelno < logging.ERROR or record.name != TELLS_OF_RANKS:
            return
        results = read_results(self.folder)
        failed = {rank: result["error"] for rank, result in sorted(results.items()) if result["code"]}
        own = [f"rank {rank}: {error}" for rank, error in failed.items() if not is_peer_failure(error)]
        for rank in [rank for rank in begun_ranks(self.folder) if rank not in results]:
            with contextlib.suppress(OSError, ValueError):
                if process_state(int(files.read_text(self.folder / f"{rank}.heartbeat"))) is None:
                    own.append(ended_without_result({rank: 0}))
        of_peers = [f"rank {rank}: {error}" for rank, error in failed.items()][:1]
        self.reason = "; ".join([*self._monitor.ended.values(), *own] or of_peers)


def ended_without_result(ranks: Mapping[int, int]) -> str:
    """Return the error of ranks whose processes ended without writing a result: rank → exit code, 0 if unknown."""
    names = " and ".join(f"rank {rank}" for rank in sorted(ranks)) or "a rank"
    return f"{names} ended without a result ({' and '.join(dict.fromkeys(map(_how, ranks.values()))) or _how(0)})"


def _how(code: int) -> str:
    """The end of a process in words, by its exit code; negative codes are signals."""
    if code in (0, -signal.SIGKILL):
        return "killed, or out of memory"
    return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


PRINTED = re.compile(r"\d+\.log", re.ASCII)  # a rank's output in this run and earlier ones, which is kept


@contextlib.contextmanager
def rank_folder(run_dir: Path, several_machines: bool) -> Iterator[Path]:
    """Yield <run>/ranks, emptied. With several machines, it is filled at the end on the machine with the run's directory."""
    folder = own = run_dir / "ranks"
    if several_machines:
        own = Path(tempfile.mkdtemp(dir=get_temp_dir()))  # goes with the run
    else:
        _empty(folder)
    try:
        yield own
    finally:
        _gather_output(own)
        if several_machines and run_dir.is_dir():
            _empty(folder)
            shutil.copytree(own, folder, dirs_exist_ok=True)


def _empty(folder: Path) -> None:
    """Make the folder, and keep only ordinary files of ranks' output in it.

    The run's directory may come from a stranger, so nothing is written through links and strange files are not collected.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        folder.unlink()
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if not (stat.S_ISREG(old.lstat().st_mode) and PRINTED.fullmatch(old.name)):
            files.remove(old)


def _gather_output(folder: Path) -> None:
    """Append each rank's output, from all its attempts, to <rank>.log, and remove the folders of torch's launcher."""
    for launched in folder.glob("drivetrain_*"):
        for printed in sorted(launched.glob("attempt_*/*/std*.log")):
            if printed.stat().st_size:
                with files.opened(printed, "rb") as part, files.opened(folder / f"{printed.parent.name}.log", "ab") as whole:
                    shutil.copyfileobj(part, whole)
        files.remove(launched)


LEFT_TO_TORCH = "SIGQUIT"  # torch demands at least one signal: one that no scheduler sends


@contextmanager
def raised_as_torch_does() -> Iterator[None]:
    """Within the context, a stop signal raises torch's SignalException, which ends the ranks, unless the signal is dropped.

    A newly forked rank inherits this handler. There the signal waits until the rank has its own handler.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    here = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if not comes_again(number, frame, here):
            raise SignalException(f"stopped by {signal.Signals(number).name}", sigval=signal.Signals(number))

    with handled_by(handle):
        if StopFlag.told_to_stop():  # before there was any rank
            raise KeyboardInterrupt
        yield


FINAL_CODES = {BAD_CONFIG, DIVERGED, INTERRUPTED}  # a rank with such an end would repeat it: no restart
PEERS_GONE = "the ranks of another machine are gone, or cannot be reached"
ANSWER_S = 10  # within which the rendezvous answers
SHUTDOWN_S = 5  # for ranks that wait for one that died

logger = logging.getLogger(__name__)


def run(job: Job, run_dir: Path, quiet: bool, on_abandoned: Callable[[Result], None] | None = None) -> Result:
    """Run the job on the ranks of this machine. Return the run's result, or that of the first failed rank.

    The ranks are forked: this process has imported torch but run nothing of it, so they start in 0.1 s. Among several machines,
    the one with rank 0 has the run's directory. If torch's launcher waits for a lost machine, this process calls
    `on_abandoned` and exits.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from drivetrain.parallel.process_group import ProcessGroupStrategy

    if job.run.parallel.local_ranks() > 1:
        import torch._dynamo  # noqa: F401 - DDP and FSDP import it: once here, before the fork, or 1.4 s in every rank

    end_openmp_threads()
    parallel = ProcessGroupStrategy.of(job.run)
    sys.stdout.flush()
    failed: dict[int, int] = {}  # rank → exit code
    with rank_folder(run_dir, parallel.nnodes > 1) as folder:
        held = RunDirHandle(folder)
        monitor = HeartbeatMonitor(folder, parallel.heartbeat_timeout_s, parallel.timeout_s, parallel.max_restarts > 0)
        failures = FailureRecorder(folder, monitor)

        def abandon() -> None:
            result = _result_of_ranks(folder, run_dir, parallel, {}, monitor.ended)
            if on_abandoned is not None:
                on_abandoned(result)
            os._exit(result.code)

        if on_abandoned is not None:
            monitor.abandoned = abandon
        with monitor, failures, _rendezvous_errors(parallel):
            try:
                with raised_as_torch_does():
                    _launch_ranks(parallel, folder, job, run_dir, failures, quiet)
            except ChildFailedError as error:  # most ranks have written the reason to their files
                failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
            except SignalException:
                if not begun_ranks(folder):
                    raise KeyboardInterrupt from None
        return _result_of_ranks(held.folder() or folder, run_dir, parallel, failed, monitor.ended)


class Gate:
    """Holds forked ranks until all ranks of this machine are forked.

    When a rank connects to the launcher's store, a thread of the store looks up a name under a lock of the C library. A rank
    forked at this moment would inherit the taken lock and wait for ever.
    """

    def __init__(self) -> None:
        self._ends = (-1, -1)  # reading end of a pipe; the writing end stays open during the forks

    def around(self, start: Callable[P, T]) -> Callable[P, T]:
        """Return a version of `start` that holds its forked ranks until it returns. Where it fails, it leaves none."""

        def started(*args: P.args, **kwargs: P.kwargs) -> T:
            self._ends, others = os.pipe(), multiprocessing.active_children()
            try:
                with apart_after_fork():
                    return start(*args, **kwargs)
            except BaseException:
                for rank in (child for child in multiprocessing.active_children() if child not in others):
                    rank.kill()
                raise
            finally:
                for end in self._ends:
                    os.close(end)

        return started

    def wait(self) -> None:
        """In a rank: wait for the others."""
        reading, writing = self._ends
        os.close(writing)
        os.read(reading, 1)  # returns when nobody holds the other end any more
        os.close(reading)


def _launch_ranks(parallel: ProcessGroupStrategy, folder: Path, *of_entry: object) -> None:
    """Start the ranks of this machine and wait for their end; `of_entry` are the arguments of `_rank_entry`."""
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.elastic.multiprocessing import start_processes
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
    from torch.distributed.launcher.api import elastic_launch

    # Torch searches the source of every frame to name an unrecorded event: most of a second per start.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    gate = Gate()
    local_elastic_agent.start_processes = gate.around(start_processes)
    try:
        elastic_launch(_launch_config(parallel, folder), _rank_entry)(gate, *of_entry)
    except RendezvousConnectionError:
        if parallel.nnodes == 1:
            raise
        # Two launchers on one host started at the same moment. The other one has the port and answers now.
        elastic_launch(_launch_config(parallel, folder), _rank_entry)(gate, *of_entry)


def _launch_config(parallel: ProcessGroupStrategy, folder: Path) -> LaunchConfig:
    """The settings of torch's launcher. Raises UserError if the rendezvous is unusable."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    signals = os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = LEFT_TO_TORCH
    newer: JsonObject = {"signals_to_handle": signals, "shutdown_timeout": SHUTDOWN_S, "numa_options": False}
    # Only the settings of this torch's version. Without `numa_options` torch would ask for devices, and an initialised CUDA
    # does not survive the fork; its choice would be None anyway.
    newer = {k: v for k, v in newer.items() if k in LaunchConfig.__dataclass_fields__}
    address, rendezvous = (own_address(), {}) if parallel.nnodes == 1 else _rendezvous(parallel)
    own = f"[{address}]:0" if ":" in address else f"{address}:0"
    # Ranks other than the first write their output to files: a machine's terminal shows the lines of one rank.
    local = parallel.local_ranks()
    output = DefaultLogsSpecs(log_dir=str(folder), redirects=dict.fromkeys(range(1, local), Std.ALL))
    config = LaunchConfig(
        min_nodes=parallel.nnodes, max_nodes=parallel.nnodes, nproc_per_node=local, run_id="drivetrain", rdzv_backend="c10d",
        rdzv_endpoint=parallel.rendezvous or own, rdzv_configs=rendezvous, max_restarts=parallel.max_restarts,
        monitor_interval=0.1, start_method="fork", local_addr=address, logs_specs=output, **newer,
    )  # fmt: skip
    config.numa_options = None
    return config


def _rendezvous(parallel: ProcessGroupStrategy) -> tuple[str, JsonObject]:
    """This machine's address for the others, and the settings of torch's rendezvous. Raises UserError."""
    host, _, given = str(parallel.rendezvous).rpartition(":")
    port = int(given)
    address = local_address_towards(host, port)
    here = can_listen(host)
    is_host = here and can_listen(host, port)  # if one machine plays two, the first of them is
    if not here:  # the machine that has the address opens the store
        wait_for_listener(host, port, parallel.rendezvous_s)
    if not is_host and not is_torch_store(host, port, ANSWER_S):
        what = (
            f"port {port} of this machine is in use by something else"
            if here
            else f"the answer there is not from one of this run's machines (another program, or a firewall on the way to {host})"
        )
        raise UserError(f"parallel.rendezvous={parallel.rendezvous}: {what}: set a free port, the same on each machine")
    use_interface_of(address)
    return address, {"is_host": is_host, "join_timeout": int(parallel.rendezvous_s), "read_timeout": ANSWER_S}


@contextlib.contextmanager
def _rendezvous_errors(parallel: ProcessGroupStrategy) -> Iterator[None]:
    """Within the context, turn a failed meeting of machines into a UserError that names the setting."""
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

    try:
        yield
    except (RendezvousError, OSError) as error:
        if parallel.nnodes == 1:
            raise
        if isinstance(error, socket.gaierror):
            raise UserError(
                f"parallel.rendezvous={parallel.rendezvous}: there is no host of that name: give the name or address of one of "
                "the machines"
            ) from None
        late = isinstance(error, RendezvousTimeoutError | TimeoutError)
        why = f" within {parallel.rendezvous_s:g} s" if late else f" ({type(error).__name__}: {str(error).splitlines()[0]})"
        raise UserError(
            f"parallel.rendezvous={parallel.rendezvous}: {parallel.nnodes} machines did not meet{why}: start the same command on "
            "each of them; the host must be one of theirs, its port free and reachable"
        ) from None


def _rank_entry(gate: Gate, job: Job, run_dir: Path, failures: FailureRecorder, quiet: bool) -> None:
    """The main function of a rank's process: write its result to <rank>.json and exit with its code.

    After a restart `failures` has the reason known when this process was forked.
    """
    disown_garbage()
    world, folder = world_of_environment(), failures.folder
    logs.configure(quiet, world.rank, shared=world.local_rank == 0)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    moved = world.rank == 0 and job.run.parallel.nnodes == 1 and not run_dir.is_dir()  # it would start from the beginning
    if restarts and (code := _final_code(folder) or FAILED * moved):
        os._exit(code)
    (folder / f"{world.rank}.json").unlink(missing_ok=True)
    held = RunDirHandle(folder)
    start_heartbeat(folder, world.rank)
    gate.wait()
    with StopFlag() as stop, contextlib.ExitStack() as stack:
        if world.rank == 0:
            if job.run.parallel.nnodes > 1:  # only now this machine is known to hold the run's directory
                if not run_dir.is_dir():
                    directory.make(run_dir)
                stack.enter_context(directory.locked(run_dir))
                job.write_files(run_dir)
                stack.enter_context(logs.to_file(run_dir / "log.txt"))
            if restarts:
                _restart_from_newest(job, run_dir, failures.reason or "a rank of another machine was lost", restarts)
        result = run_rank(job, world, run_dir, stop, quiet)
    with contextlib.suppress(OSError):  # a full disk or a removed directory: the exit code still reports the failure
        folder = held.folder() or folder
        write_json(folder / f"{world.rank}.json", {**asdict(result), "time": process.now(), "run_dir": None})
    if result.code:
        sys.stdout.flush()
        os._exit(result.code)  # at once: the launcher ends the ranks that wait for this one


def _restart_from_newest(job: Job, run_dir: Path, reason: str, restarts: int) -> None:
    """Set the job's checkpoint to the newest valid one, and log it with the reason of the restart."""
    manifest.recover(run_dir)  # the run's own process holds the lock
    job.checkpoint, problems = manifest.newest_valid(run_dir)
    where = f"from {job.checkpoint}" if job.checkpoint else "from the beginning"
    for line in [*problems, f"{reason}: all start again {where} (restart {restarts})"]:
        logger.warning("%s", line)


def _final_code(folder: Path) -> int:
    """The exit code of a local rank that a restart would not change; 0 without one."""
    results = read_results(folder).values()
    return next((int(r["code"]) for r in results if r["code"] in FINAL_CODES and not is_peer_failure(r["error"])), 0)


def _result_of_ranks(
    folder: Path, run_dir: Path, parallel: ProcessGroupStrategy, failed_first: dict[int, int], ended_by_monitor: dict[int, str]
) -> Result:
    """The result of this machine's ranks; torch's launcher ended the others because of `failed_first`.

    These have their processes' exit codes.
    """
    results = read_results(folder)
    begun = sorted({*begun_ranks(folder), *ended_by_monitor})
    lost = sorted(set(begun) - set(results))
    failed = {rank: found for rank, found in results.items() if found["code"]}
    alone = all(is_peer_failure(found["error"]) for found in failed.values())  # none failed of its own accord
    main = results.get(0) or (None if parallel.nnodes == 1 else next(iter(results.values()), None))
    content: JsonObject = main or next(iter(failed.values()), {"world_size": parallel.ranks(), "code": FAILED})
    result = Result(**{key: value for key, value in content.items() if key not in ("code", "signal", "time")})
    result.run_dir, result.code = run_dir if 0 in begun else None, content["code"]
    if main is None or (result.code != INTERRUPTED and (lost or failed)):
        if alone and (lost or not failed):
            first = {rank: code for rank, code in failed_first.items() if rank in lost} or dict.fromkeys(lost, 0)
            why = "; ".join(ended_by_monitor[rank] for rank in lost if rank in ended_by_monitor) or ended_without_result(first)
            result.status, result.error, result.code = "failed", why, FAILED
        elif alone and parallel.nnodes > 1:
            end_without_peers(result, run_dir, PEERS_GONE)
        else:
            result.status, result.error, result.code = _first_failure(failed)
    if lost and manifest.checkpoints(run_dir):
        result.error = f"{result.error}: go on with resume={run_dir}"
    return result


def _first_failure(failed: RankResults) -> tuple[str, str, int]:
    """Status, error and code of the first rank that failed by itself; the error names the rank if that helps."""
    own = {rank: found for rank, found in failed.items() if not is_peer_failure(found["error"])} or failed
    rank = min(own, key=lambda rank: own[rank]["time"])
    named = len({found["error"] for found in own.values()}) > 1 or (len(own) == 1 and rank)
    return own[rank]["status"], f"rank {rank}: {own[rank]['error']}" if named else own[rank]["error"], own[rank]["code"]


def end_without_peers(result: Result, run_dir: Path, error: str) -> None:
    """Fill in status, error and code of ranks that failed only for lack of others."""
    result.status, result.error, result.code = "failed", error, FAILED
    if manifest.checkpoints(run_dir):
        result.status, result.error, result.code = "interrupted", f"{error}: go on with resume={run_dir}", INTERRUPTED
