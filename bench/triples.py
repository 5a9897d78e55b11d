"""`python -m bench.triples`: random options of three groups, trained two updates and saved, or refused with a reason.

Each triple runs in a process that is forked from one which has imported torch; a strategy of several ranks in two of them,
which meet as those of a launcher do. What else happens (an exception, a process that dies or hangs) is open. A tenth of those
that trained in one process are certified against the same run with its exact and close techniques switched off.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support import pairwise

from bench import harness

SEED = 27
SECONDS = 240  # that a triple may take
TRAINED, REFUSED, OPEN = "trained", "refused", "open"
SMALLER = "a BatchNorm sees smaller micro-batches"
CERTIFIED = 10  # one in so many of those that trained in one process
STEPS = 2  # updates that are certified
# Half a minute of compiling or of trials in processes of their own: one triple in twenty may have them.
SLOW = ("compile=inductor", "compile=regional", "compile=step", "checkpointing=budget", "batch=auto", "batch=critical")
SLOW_IN = 20
IMPORTED = (
    "torch", "timm", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
    "sklearn.datasets", "torchmetrics", "datasets", "mlflow", "wandb",
    "drivetrain.engine.build", "drivetrain.launch.worker", "drivetrain.measure.certify.certify",
)  # fmt: skip
Words = tuple[str, ...]


@dataclass
class Ended:
    """What became of a triple."""

    words: Words
    outcome: str
    said: str = ""
    certified: str | None = None  # the answer, or why there is none; None: not asked
    cpu: float = 0.0  # seconds of its processes
    number: int = 0  # of the triple, in the order in which they are drawn


def drawn(seed: int, able: Callable[[str], bool], slow: bool = True) -> Iterator[Words]:
    """Triples without an end, the same ones for the same seed, of options that this machine can run."""
    dice, groups = random.Random(seed), pairwise.factors()
    for n in itertools.count():
        allowed = slow and n % SLOW_IN == 0
        words: Words = ()
        while not words or not all(able(word) and (allowed or word not in SLOW) for word in words):
            words = tuple(dice.choice(groups[group]) for group in dice.sample(sorted(groups), 3))
        yield words


def run(triples: Iterable[tuple[int, Words]], folder: Path, jobs: int = 1, seconds: float = 3600.0) -> Iterator[Ended]:
    """Try numbered triples, some at a time, as far as the seconds last."""
    for module in IMPORTED:
        import_module(module)
    from drivetrain.core import forking

    forking.start_autograd_engine()
    until, running = time.monotonic() + seconds, dict[int, tuple[int, Words, Path, float]]()
    waiting = iter(triples)
    while True:
        while len(running) < jobs and time.monotonic() < until and (following := next(waiting, None)) is not None:
            number, words = following
            answer = folder / f"{number}.json"
            pid = _forked(partial(_try, words, folder, answer, number % CERTIFIED == 0))
            running[pid] = number, words, answer, time.monotonic()
        if not running:
            return
        yield from _ended(running)


def _ended(running: dict[int, tuple[int, Words, Path, float]]) -> Iterator[Ended]:
    """The triples whose process has ended; one that hangs is killed with all that it has started."""
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
    """End what a triple's process has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _forked(work: Callable[[], None]) -> int:
    """Do the work in a forked process with a session of its own, silently. Returns its id."""
    from drivetrain.core.forking import end_openmp_threads

    sys.stdout.flush()
    end_openmp_threads()
    if (pid := os.fork()) != 0:
        return pid
    try:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silent, stream)
        work()
    finally:
        os._exit(0)


def _try(words: Words, folder: Path, answer: Path, certifies: bool) -> None:
    """Say in a file what becomes of a triple."""
    from drivetrain.core.errors import UserError
    from drivetrain.launch.job import prepare

    sys.path.insert(0, str(folder))
    place = Path(tempfile.mkdtemp(dir=folder))
    os.chdir(place)
    try:
        overrides = [*pairwise.complete(words, folder), f"output_dir={place}"]
        job = prepare(overrides)
        ranks = job.run.parallel.ranks()
    except UserError as error:
        ended = Ended(words, REFUSED, str(error))
    except BaseException as error:
        ended = Ended(words, OPEN, f"{type(error).__name__}: {error}")
    else:
        ended = _trained(words, folder, ranks)
        if certifies and ended.outcome == TRAINED and ranks == 1:
            ended.certified = certified(overrides, job.run)
    answer.write_text(json.dumps(asdict(ended)))


def _trained(words: Words, folder: Path, ranks: int) -> Ended:
    """Train, as rank 0 of so many."""
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


def certified(overrides: list[str], run: Any) -> str:
    """Certify a run beside its plain twin: the answer, or why there is none."""
    from drivetrain.core.errors import UserError
    from drivetrain.launch.job import prepare
    from drivetrain.measure.benchmark import arms
    from drivetrain.measure.certify import certify, explain
    from drivetrain.measure.overrides import apply

    try:
        changes = certify.plain_changes(run)
        if not changes:
            return "none of its techniques claims to be exact or close"
        words = arms.without_saving(overrides)
        done = certify.certify(prepare(words), prepare(apply(words, changes)), STEPS)
        if explain.first_batch_norm(done.verdict, done.reference) and any(word.startswith("batch=") for word in changes):
            # Other micro-batches have other statistics. The other techniques are judged at these.
            changes = [word for word in changes if not word.startswith("batch=")]
            if not changes:
                return SMALLER
            done = certify.certify(prepare(words), prepare(apply(words, changes)), STEPS)
    except UserError as error:
        return f"cannot be judged: {error}"
    except Exception as error:
        return f"{OPEN}: {type(error).__name__}: {error}"
    return str(done.verdict.answer)


def summary(ended: Sequence[Ended]) -> dict[str, Any]:
    """Counts, and every open triple."""
    counts = Counter(each.outcome for each in ended)
    cpu = sorted(each.cpu for each in ended)
    answers = Counter(each.certified.partition(":")[0] for each in ended if each.certified is not None)
    return {
        "triples": len(ended),
        **{outcome: counts[outcome] for outcome in (TRAINED, REFUSED, OPEN)},
        "certified": dict(answers),
        "cpu_seconds": {"median": cpu[len(cpu) // 2], "mean": sum(cpu) / len(cpu)} if cpu else None,
        "open_triples": [asdict(each) for each in ended if each.outcome == OPEN or wrong(each)],
        "not_judged": [asdict(each) for each in ended if (each.certified or "").startswith("cannot be judged")],
    }


def wrong(ended: Ended) -> bool:
    """Whether it was certified and is not the same mathematics."""
    return ended.certified is not None and ended.certified.startswith(("differs", OPEN))


def before(journal: Path | None) -> list[Ended]:
    """The triples that ended in earlier calls with this journal."""
    if journal is None or not journal.exists():
        return []
    rows = map(json.loads, journal.read_text(encoding="utf-8").splitlines())
    return [Ended(**{**row, "words": tuple(row["words"])}) for row in rows]


def main() -> None:
    """Try, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triples", type=int, default=5000)
    parser.add_argument("--begin", type=int, default=0, help="the number of the first one: those below have run elsewhere")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=1, help="triples at a time")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument(
        "--journal", type=Path, help="a file to which each ended triple goes, and from which a later call goes on"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = f"{name}/state"
        pairwise.prepare_folder(folder)
        able = cache(lambda word: pairwise.refused([word], folder) is None)
        ended = before(given.journal)
        done = {each.number for each in ended}
        numbered = enumerate(itertools.islice(drawn(given.seed, able), given.triples))
        left = ((number, words) for number, words in numbered if number >= given.begin and number not in done)
        for each in run(left, folder, given.jobs, given.minutes * 60):
            ended.append(each)
            if given.journal:
                with given.journal.open("a", encoding="utf-8") as journal:
                    journal.write(json.dumps(asdict(each)) + "\n")
            print(
                f"{len(ended)} {each.outcome}, {each.cpu:.1f} s: {' '.join(each.words)} {each.said} {each.certified or ''}",
                flush=True,
            )
    found = summary(ended)
    rows = [[name, str(found[name])] for name in ("triples", TRAINED, REFUSED, OPEN, "certified", "cpu_seconds")]
    harness.table("triples of options", ["", ""], rows)
    numbers = [min(each.number for each in ended), max(each.number for each in ended)] if ended else None
    content = {"environment": harness.machine(), "seed": given.seed, "numbers": numbers, **found}
    harness.write(given.out or harness.RESULTS / "triples-cpu.json", content)
    raise SystemExit(any(each.outcome == OPEN or wrong(each) for each in ended))


if __name__ == "__main__":
    main()
