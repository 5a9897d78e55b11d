"""The ranks of this machine, started by torch's elastic launcher from the one composed config; other machines do the same."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import BAD_CONFIG, EXIT_OF_STATUS, FAILED, GONE, INTERRUPTED, UserError, is_of_others
from drivetrain.core.files import write_json
from drivetrain.core.signals import ASKED_TO_STOP, StopFlag
from drivetrain.launch import network
from drivetrain.launch.heartbeat import Deaths, Watch, alive, wordless
from drivetrain.parallel import world_of_environment
from drivetrain.run import directory
from drivetrain.run.result import Result
from drivetrain.saving import manifest
from drivetrain.ui import terminal

if TYPE_CHECKING:
    from drivetrain.launch.job import Job

FINAL = {BAD_CONFIG, EXIT_OF_STATUS["diverged"], INTERRUPTED}  # codes of ranks that would end the same way again
OTHERS_GONE = "the ranks of another machine are gone, or cannot be reached"
ANSWER_S = 10  # within which the place to meet answers
SHUTDOWN_S = 5  # for the ranks that a dead one leaves waiting


End = Callable[[Result, int], int]


def run(job: Job, run_dir: Path, quiet: bool, end: End | None = None) -> tuple[Result, int]:
    """Run the job on the ranks of this machine; the run's result, or the reason of the rank that failed first.

    Where the launcher hangs on a machine that is gone, `end(result, code)` writes the result and this process exits.

    The ranks are forked: this process has imported torch and run nothing of it, so they start in 0.1 s. Of several machines
    the one that gets rank 0 has the run's directory.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if job.run.parallel.local_ranks() > 1:
        import torch._dynamo  # noqa: F401 - DDP and FSDP want it: once here, before the fork, or 1.4 s in every rank

    parallel = job.run.parallel
    sys.stdout.flush()
    died: set[int] = set()
    with _told(run_dir, parallel.nnodes > 1) as told:
        watch = Watch(told, parallel.heartbeat_timeout_s, parallel.timeout_s, parallel.max_restarts > 0)
        deaths = Deaths(told, watch)

        def abandoned() -> None:
            code = end(*_outcome(told, run_dir, parallel, set(), watch.lost)) if end else FAILED
            shutil.rmtree(told, ignore_errors=True)
            os._exit(code)

        if parallel.nnodes > 1:
            watch.abandoned = abandoned
        with watch, deaths, _met(parallel):
            try:
                _launched(parallel, told, job, run_dir, deaths, quiet)
            except ChildFailedError as error:  # the ranks have told why, but those that could not
                died = set(error.failures)
            except SignalException:
                pass
        return _outcome(told, run_dir, parallel, died, watch.lost)


def _launched(parallel: Any, told: Path, *of_entry: Any) -> None:
    """The ranks of this machine, to their end."""
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
    from torch.distributed.launcher.api import elastic_launch

    try:
        elastic_launch(_config(parallel, told), _entry)(*of_entry)
    except RendezvousConnectionError:
        if parallel.nnodes == 1:
            raise
        # Of two that play machines on one host at the same moment one was faster: its place to meet is open now.
        elastic_launch(_config(parallel, told), _entry)(*of_entry)


@contextlib.contextmanager
def _told(run_dir: Path, several: bool) -> Iterator[Path]:
    """Where the ranks of this machine leave their words: in the run's directory, once that is known to be here."""
    told = run_dir / "ranks"
    if not several:
        told.mkdir(exist_ok=True)
        for old in [*told.glob("*.json"), *told.glob("*.alive"), *told.glob("*.stack")]:
            old.unlink()
        try:
            yield told
        finally:
            _gather_output(told)
        return
    folder = Path(tempfile.mkdtemp(prefix="drivetrain-ranks-"))
    try:
        yield folder
    finally:
        _gather_output(folder)
        if run_dir.is_dir():
            shutil.copytree(folder, told, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _gather_output(told: Path) -> None:
    """What each rank printed, all attempts after one another, as <rank>.log: the launcher has a folder for each."""
    for folder in told.glob("drivetrain_*"):
        for printed in sorted(folder.glob("attempt_*/*/std*.log")):
            if printed.stat().st_size:
                with printed.open("rb") as part, (told / f"{printed.parent.name}.log").open("ab") as whole:
                    shutil.copyfileobj(part, whole)
        shutil.rmtree(folder, ignore_errors=True)


def _config(parallel: Any, told: Path) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    local = parallel.local_ranks()
    signals = ",".join(s.name for s in ASKED_TO_STOP)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
    newer: dict[str, Any] = {"signals_to_handle": signals, "shutdown_timeout": SHUTDOWN_S}  # where torch knows them
    newer = {k: v for k, v in newer.items() if k in LaunchConfig.__dataclass_fields__}
    own = "localhost"
    about: dict[str, Any] = {}
    if parallel.nnodes > 1:
        host, _, given = parallel.rendezvous.rpartition(":")
        port = int(given)
        own = network.address_towards(host, port)
        here = network.is_here(host)
        opens = here and network.free_port(host, port)  # where one machine plays two, the first of them does
        if not here:  # the one that has the address opens the place to meet; from then on it answers at once, or is gone
            network.wait_for(host, port, parallel.rendezvous_s)
        if not opens and not network.is_meeting_place(host, port, ANSWER_S):
            what = (
                f"port {port} of this machine is in use by something else"
                if here
                else f"what answers there is none of this run's machines (another program, or a firewall on the way to {host})"
            )
            raise UserError(f"parallel.rendezvous={parallel.rendezvous}: {what}: set a free port, the same on each machine")
        network.talk_through(own)
        about = {"is_host": opens, "join_timeout": int(parallel.rendezvous_s), "read_timeout": ANSWER_S}
    # The ranks but the first write their output to files: one machine's terminal shows one rank's lines.
    logs = DefaultLogsSpecs(log_dir=str(told), redirects=dict.fromkeys(range(1, local), Std.ALL))
    return LaunchConfig(
        min_nodes=parallel.nnodes, max_nodes=parallel.nnodes, nproc_per_node=local, run_id="drivetrain", rdzv_backend="c10d",
        rdzv_endpoint=parallel.rendezvous or "localhost:0", rdzv_configs=about, max_restarts=parallel.max_restarts,
        monitor_interval=0.1, start_method="fork", local_addr=own, logs_specs=logs, **newer,
    )  # fmt: skip


@contextlib.contextmanager
def _met(parallel: Any) -> Iterator[None]:
    """Machines that do not meet are the user's to mend."""
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


def _entry(job: Job, run_dir: Path, deaths: Deaths, quiet: bool) -> None:
    """One rank: its result goes to ranks/<rank>.json, its exit code to the launcher. `deaths` is as when it was forked."""
    from drivetrain.launch.launcher import _describe, _rank

    world, told = world_of_environment(), deaths.folder
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts and (code := _settled(told)):
        os._exit(code)
    (told / f"{world.rank}.json").unlink(missing_ok=True)
    alive(told, world.rank)
    with contextlib.ExitStack() as held:
        if world.rank == 0:
            if job.run.parallel.nnodes > 1:  # only now it is known that the run's directory is here
                if not run_dir.is_dir():
                    directory.make(run_dir)
                held.enter_context(directory.held(run_dir))
                _describe(job, run_dir)
            if restarts:
                job.checkpoint, said = manifest.newest_valid(run_dir)
                where = f"from {job.checkpoint}" if job.checkpoint else "from the beginning"
                why = deaths.why or "a rank of another machine was lost"
                for line in [*said, f"{why}: all start again {where} (restart {restarts})"]:
                    terminal.say(line)
        stop = held.enter_context(StopFlag())
        result, code = _rank(job, world, run_dir, stop, quiet)
    content = {**asdict(result), "code": code, "time": time.time(), "run_dir": None}
    write_json(told / f"{world.rank}.json", content)
    if code:
        sys.stdout.flush()
        os._exit(code)  # at once: the launcher ends the ranks that wait for this one


def _settled(told: Path) -> int:
    """The code of a rank of this machine that has ended in a way that starting again does not change; 0: of none."""
    for file in told.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(file.read_text())
            if content["code"] in FINAL and not _is_consequence({0: content}):
                return int(content["code"])
    return 0


def _outcome(told: Path, run_dir: Path, parallel: Any, died: set[int], ended_by_us: dict[int, str]) -> tuple[Result, int]:
    """What the ranks of this machine came to; `died` are those whose end made the launcher end the others."""
    ended: dict[int, Any] = {}
    for file in told.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            ended[int(file.stem)] = json.loads(file.read_text())
    begun = sorted({int(f.stem) for f in told.glob("*.alive")} | set(ended_by_us))
    lost = sorted(set(begun) - set(ended))
    main = ended.get(0) or (None if parallel.nnodes == 1 else next(iter(ended.values()), None))
    failed = {r: e for r, e in ended.items() if e["code"]}
    if main is not None and (main["code"] == INTERRUPTED or (not lost and not failed)):
        content = main
    elif (lost and _is_consequence(failed)) or not failed:
        names = " and ".join(f"rank {r}" for r in sorted(died.intersection(lost)) or lost) or "a rank"
        why = "; ".join(ended_by_us[r] for r in lost if r in ended_by_us) or wordless(names)
        content = {**(main or {"world_size": parallel.ranks()}), "status": "failed", "error": why, "code": FAILED}
    elif parallel.nnodes > 1 and _is_consequence(failed):
        content = {**(main or next(iter(failed.values()))), **_left_alone(run_dir, OTHERS_GONE)}
    else:
        own = {r: e for r, e in failed.items() if not _is_consequence({r: e})} or failed
        rank = min(own, key=lambda r: own[r]["time"])
        told_why = {k: own[rank][k] for k in ("status", "error", "code", "world_size", "overrides", "config_hash")}
        content = {**(main or {}), **told_why}
        if len({e["error"] for e in own.values()}) > 1 or (len(own) == 1 and rank):
            content["error"] = f"rank {rank}: {content['error']}"
    if lost and manifest.checkpoints(run_dir):
        content["error"] = f"{content['error']}: go on with resume={run_dir}"
    code = content.pop("code")
    content.pop("time", None)
    result = Result(**content)
    result.run_dir = run_dir if 0 in begun else None
    return result, code


def of_other_launcher(result: Result, code: int, run_dir: Path) -> tuple[Result, int]:
    """What a rank came to that torchrun or Slurm started: these may leave it alone, and only torch's error says so."""
    if code == FAILED and is_of_others(result.error):
        left = _left_alone(run_dir, GONE)
        result.status, result.error, code = left["status"], left["error"], left["code"]
    return result, code


def _left_alone(run_dir: Path, gone: str) -> dict[str, Any]:
    """What ranks came to that failed only because others were gone."""
    if not manifest.checkpoints(run_dir):
        return {"status": "failed", "error": gone, "code": FAILED}
    return {"status": "interrupted", "error": f"{gone}: go on with resume={run_dir}", "code": INTERRUPTED}


def _is_consequence(failed: dict[int, Any]) -> bool:
    """Whether all of these ranks failed only because another was gone."""
    return all(is_of_others(e["error"]) for e in failed.values())
