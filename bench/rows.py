"""Rows of options, each trained two updates and saved in a process of its own: `bench.triples` and `bench.pairwise` run them.

The processes are forked from one which has imported torch. A strategy of several ranks runs in as many of them, which meet as
those of a launcher do. A row has trained, or was refused with a reason. All else (an exception, a process that dies or hangs)
is open.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support import pairwise

SECONDS = 240  # that a row may take
TRAINED, REFUSED, OPEN = "trained", "refused", "open"
# These take half a minute: they compile, or try sizes in processes of their own.
SLOW = ("compile=inductor", "compile=regional", "compile=step", "checkpointing=budget", "batch=auto", "batch=critical")
IMPORTED = (
    "torch", "timm", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
    "sklearn.datasets", "torchmetrics", "datasets", "mlflow", "wandb",
    "drivetrain.engine.build", "drivetrain.launch.worker", "drivetrain.measure.certify.certify",
)  # fmt: skip
Words = tuple[str, ...]
Judge = Callable[[int, list[str], Any], str | None]  # number, overrides and settings of a row that trained in one process


@dataclass
class Ended:
    """What became of a row."""

    words: Words
    outcome: str
    said: str = ""
    certified: str | None = None  # the answer, or why there is none; None: not asked
    cpu: float = 0.0  # seconds of its processes
    number: int = 0  # of the row, in the order in which they are drawn


def run(
    rows: Iterable[tuple[int, Words]], folder: Path, jobs: int = 1, seconds: float = 3600.0, judge: Judge | None = None
) -> Iterator[Ended]:
    """Try numbered rows, some at a time, as far as the seconds last. What `judge` answers goes into `certified`."""
    for module in IMPORTED:
        import_module(module)
    from drivetrain.core import forking

    forking.start_autograd_engine()
    until, running = time.monotonic() + seconds, dict[int, tuple[int, Words, Path, float]]()
    waiting = iter(rows)
    while True:
        while len(running) < jobs and time.monotonic() < until and (following := next(waiting, None)) is not None:
            number, words = following
            answer = folder / f"{uuid.uuid4()}.json"
            pid = _forked(partial(_try, words, folder, answer, partial(judge, number) if judge else None))
            running[pid] = number, words, answer, time.monotonic()
        if not running:
            return
        yield from _ended(running)


def _ended(running: dict[int, tuple[int, Words, Path, float]]) -> Iterator[Ended]:
    """The rows whose process has ended; one that hangs is killed with all that it has started."""
    for pid, (number, words, answer, began) in list(running.items()):
        hangs = time.monotonic() - began > SECONDS
        if hangs:
            os.killpg(pid, signal.SIGKILL)
        done, status, used = os.wait4(pid, 0 if hangs else os.WNOHANG)
        if not done:
            continue
        del running[pid]
        _end_all(pid)
        told = json.loads(answer.read_text()) if answer.exists() else {}
        ended = Ended(words, told.get("outcome", OPEN), told.get("said", ""), told.get("certified"))
        ended.cpu, ended.number = used.ru_utime + used.ru_stime, number
        if not told:
            ended.said = f"hung for {SECONDS} s" if hangs else f"the process ended with status {status}"
        yield ended
    time.sleep(0.02)


def _end_all(pid: int) -> None:
    """End what a row's process has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _forked(work: Callable[[], None]) -> int:
    """Do the work in a forked process with a session of its own, silently. Returns its id."""
    from drivetrain.core.forking import disown_garbage, end_openmp_threads

    sys.stdout.flush()
    end_openmp_threads()
    if (pid := os.fork()) != 0:
        return pid
    try:
        disown_garbage()
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silent, stream)
        work()
    finally:
        os._exit(0)


def _try(words: Words, folder: Path, answer: Path, judge: Callable[[list[str], Any], str | None] | None) -> None:
    """Say in a file what becomes of a row."""
    from drivetrain.core.errors import UserError
    from drivetrain.launch.job import prepare

    sys.path.insert(0, str(folder))
    place = Path(tempfile.mkdtemp(dir=folder))
    os.chdir(place)
    try:
        overrides = [*pairwise.complete(words, folder), f"output_dir={place}"]
        job = prepare(overrides)
        ranks = job.run.parallel.ranks()
        # What is tried before the ranks start is refused where somebody else starts them.
        tried = any(option.needs_trial for option in job.run.tried().values())
    except UserError as error:
        ended = Ended(words, REFUSED, str(error))
    except BaseException as error:
        ended = Ended(words, OPEN, f"{type(error).__name__}: {error}")
    else:
        ended = _trained(words, folder, 1 if tried else ranks)
        if judge is not None and ended.outcome == TRAINED and ranks == 1:
            ended.certified = judge(overrides, job.run)
    answer.write_text(json.dumps(asdict(ended)))


def _trained(words: Words, folder: Path, ranks: int) -> Ended:
    """Train, as rank 0 of so many; with 1, drivetrain starts the ranks of a run that has several."""
    others = []
    if ranks > 1:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            given = {
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_PORT": s.getsockname()[1],
                "MASTER_ADDR": "127.0.0.1",
            }
        os.environ.update({key: str(value) for key, value in given.items()})
        for rank in range(1, ranks):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            others.append(os.fork())
            if others[-1] == 0:
                try:
                    _train_rank(words, folder)
                finally:
                    os._exit(0)
        os.environ.update(RANK="0", LOCAL_RANK="0")
    came = pairwise.try_one(words, str(folder))
    for pid in others:
        if came.status == REFUSED:  # by rank 0 alone: the others wait for it
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if came.status == "broken" and (refusals := [file.read_text() for file in Path().glob(f"{REFUSED}-*")]):
        return Ended(words, REFUSED, refusals[0])  # rank 0 knows only that the other one is gone
    return Ended(words, OPEN if came.status == "broken" else came.status, came.reason)


def _train_rank(words: Words, folder: Path) -> None:
    """Train as a rank beside rank 0, and leave a file where the run is refused."""
    from drivetrain.core.errors import BAD_CONFIG
    from drivetrain.launch import launcher

    ended = launcher.launch(launcher.prepare_run([*pairwise.complete(words, folder), f"output_dir={folder}/runs"]))
    if ended.code == BAD_CONFIG:
        Path(f"{REFUSED}-{os.environ['RANK']}").write_text(str(ended.result.error))


def before(journal: Path | None) -> list[Ended]:
    """The rows that ended in earlier calls with this journal."""
    if journal is None or not journal.exists():
        return []
    rows = map(json.loads, journal.read_text(encoding="utf-8").splitlines())
    return [Ended(**{**row, "words": tuple(row["words"])}) for row in rows]


def keep(ended: Ended, journal: Path | None) -> None:
    """Add a row to the journal, where there is one."""
    if journal is not None:
        with journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(ended)) + "\n")
