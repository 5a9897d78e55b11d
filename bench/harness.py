"""Shared by the benchmarks: interleaved variants in live processes, paired statistics, facts of the machine, a table.

A machine's speed drifts by more than what is measured here, so no variant runs alone: each lives in a process of its own
(so that one library's imports and patches do not affect another), and all run short blocks in the order A B C … C B A.
Ratios are taken between blocks of the same round.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import platform
import pty
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import date
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.core.machine.forking import answer_of
from drivetrain.measure import intervals
from drivetrain.run import environment
from drivetrain.ui.sheet import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
T = TypeVar("T")


class Done(BaseException):
    """There are no more blocks. Not an Exception, so that no loop under test handles it as an error of training."""


class BlockSync:
    """A variant's side of the interleaving: called at the end of every block, it returns when the next one may run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._began: tuple[float, float] | None = None

    def watch(self, loss: Callable[[], float]) -> None:
        """`loss` is read before the first block and after the last: the marker that the variant trained."""
        self._loss, self.first = loss, loss()  # the latter is set anew where it is known only once the first block is under way

    def __call__(self, updates: int) -> None:
        """Hand over the block's time when the device has done its work; `updates` is the variant's own count of all it made.

        Raises Done after the last block.
        """
        synchronize()
        now = _clocks()
        self._connection.send(None if self._began is None else tuple(b - a for a, b in zip(self._began, now, strict=True)))
        if self._connection.recv() == "stop":
            self._connection.send({"updates": updates, "loss_first": self.first, "loss_last": self._loss()})
            raise Done
        self._began = _clocks()


def synchronize() -> None:
    """Wait until the accelerator, if there is one, has done all its work."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _clocks() -> tuple[float, float]:
    """The wall's seconds, and this process's on a CPU: those stand still while another process has the core."""
    return time.perf_counter(), time.process_time()


def _serve(variant: Callable[..., None], args: tuple[Any, ...], connection: Connection, terminal: str) -> None:
    screen = os.open(terminal, os.O_RDWR | os.O_APPEND)  # every variant writes to a terminal, as it would before a person
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    try:
        variant(*args, BlockSync(connection))
    except Done:
        pass
    except BaseException:
        connection.send(traceback.format_exc())
        raise


class Variant:
    """One live process. It starts at once; `ready` waits for it.

    `terminal` is a terminal, or a file that gets what the variant writes. `method` is spawn, a fresh interpreter, or fork.
    """

    def __init__(
        self, name: str, run: Callable[..., None], args: tuple[Any, ...], terminal: str, method: str = "spawn",
        answers_s: float | None = None,
    ) -> None:  # fmt: skip
        context: Any = get_context(method)
        self.name, self._answers_s = name, answers_s
        self.blocks: list[tuple[float, float]] = []  # seconds by the wall and on the CPU
        self.marker: dict[str, Any] = {}  # once it has ended
        self._connection, theirs = context.Pipe()
        # No daemon: a loader's variant has workers of its own.
        self._process = context.Process(target=_serve, args=(run, args, theirs, terminal), daemon=False)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the variant has built what it trains."""
        self._receive()

    def block(self) -> None:
        """Run one block."""
        self._connection.send("go")
        self.blocks.append(self._receive())

    def stop(self) -> None:
        """End the variant."""
        self._connection.send("stop")
        self.marker = self._receive()
        self._process.join(10)

    def kill(self) -> None:
        """End the process whatever it does."""
        self._process.kill()
        self._process.join()

    def _receive(self) -> Any:
        try:
            answered = self._connection.poll(self._answers_s)
            message = self._connection.recv() if answered else f"did not answer for {self._answers_s} s"
        except EOFError:
            self._process.join(1)
            message = f"died with exit code {self._process.exitcode}"
        if isinstance(message, str):
            raise RuntimeError(f"variant {self.name}: {message}")
        return message


def turns(
    live: list[Variant], rounds: int, failed: Callable[[Variant, RuntimeError], None] | None = None
) -> Iterator[None]:  # fmt: skip
    """Run a block of each variant a round; the order alternates. One that fails is no longer live, where `failed` takes it."""
    for number in range(rounds):
        for variant in live[:: 1 if number % 2 == 0 else -1]:
            try:
                variant.block()
            except RuntimeError as error:
                if failed is None:
                    raise
                live.remove(variant)
                failed(variant, error)
        yield


def run_rounds(
    variants: dict[str, tuple[Callable[..., None], tuple[Any, ...]]], rounds: int, warmup: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, dict[str, Any]]]:
    """Seconds (wall, CPU) of each variant's blocks, one a round, and its marker."""
    with _screen() as terminal:
        live = [Variant(name, run, args, terminal) for name, (run, args) in variants.items()]
        try:
            for variant in live:
                variant.ready()
            for _ in turns(live, warmup + rounds):
                pass
            for variant in live:
                variant.stop()
            return {v.name: v.blocks[warmup:] for v in live}, {v.name: v.marker for v in live}
        finally:
            for variant in live:
                variant.kill()


@contextmanager
def _screen() -> Iterator[str]:
    """The name of a pseudo-terminal, whose output is read and discarded."""
    ours, theirs = pty.openpty()

    def forget() -> None:
        try:
            while os.read(ours, 65536):
                pass
        except OSError:  # closed
            pass

    threading.Thread(target=forget, daemon=True).start()
    try:
        yield os.ttyname(theirs)
    finally:
        os.close(theirs)


def ours(
    overrides: Sequence[str], updates: int, marker: Callable[[Any], float], sync: BlockSync, files: bool = False
) -> None:  # fmt: skip
    """drivetrain's loop as a variant: `Trainer.fit()` of a checked config, whose blocks end with a training record.

    `updates` are those of a block, `marker(trainer)` is what `sync` watches. With `files` the run's loggers write, and its live
    line is shown; else nothing is logged but that record.
    """
    from drivetrain.config import validate
    from drivetrain.core.world import World
    from drivetrain.engine import build
    from drivetrain.engine.context import RunContext
    from drivetrain.launch import launcher
    from drivetrain.ui import terminal

    job = launcher.prepare(overrides)
    validate.validate_device(job.run)
    with tempfile.TemporaryDirectory() as folder:
        sinks: list[Any] = []
        trainer = build.build(RunContext(job.run, World(), Path(folder)), sinks)
        for logger in job.run.logger if files else ():
            logger.start(Path(folder), 0)
            sinks.append(logger)
        sinks += [terminal.ProgressLine(trainer.max_updates, trainer.epochs)] if files else []
        sync.watch(lambda: marker(trainer))
        sinks.append(Sink(lambda record: sync(record["update"]) if record["update"] % updates == 0 else None))
        sync(0)
        trainer.fit()


class Sink:
    """A log writer that hands over training records; evaluations and whatever else is logged it leaves out."""

    def __init__(self, on_train: Callable[[dict[str, Any]], None]) -> None:
        self.on_train = on_train

    def log(self, record: dict[str, Any]) -> None:
        if record["event"] == "train":
            self.on_train(record)

    def close(self, status: str = "completed") -> None:
        pass


def steps(
    title: str, loops: dict[str, Callable[..., None]], work: Any, updates: int, rounds: int, warmup: int, unit: str
) -> dict[str, Any]:  # fmt: skip
    """Run loops in turns, the first of them the one written by hand; show and return what an update of each takes.

    `updates` are those of a block; `unit` is us or ms. A loop has trained where it counted its updates and its loss fell.
    """
    seconds, markers = run_rounds({name: (loop, (work,)) for name, loop in loops.items()}, rounds, warmup)
    times = [
        {n: [{"us": 1e6, "ms": 1e3}[unit] * each[clock] / updates for each in of] for n, of in seconds.items()}
        for clock in (0, 1)
    ]
    found = {}
    for name, marker in markers.items():
        trained = marker["updates"] == updates * (rounds + warmup) and marker["loss_last"] < marker["loss_first"]
        found[name] = {**marker, "trained": trained}
        for key, of in zip(("", "cpu_"), times, strict=True):
            found[name] |= {f"{key}{unit}": spread(of[name]), f"{key}to_hand": against(of[name], next(iter(of.values())))}
    rows = [
        [name, f"{a[unit]['median']:.2f}", f"{a[unit]['p10']:.2f} – {a[unit]['p90']:.2f}", ratio(a["to_hand"]["ratio"], 3),
         f"{a[f'cpu_{unit}']['median']:.2f}", ratio(a["cpu_to_hand"]["ratio"], 3), f"{a['updates']:,}",
         f"{a['loss_first']:.3f} → {a['loss_last']:.3f}" + ("" if a["trained"] else ": did not train, its figures mean nothing")]
        for name, a in found.items()
    ]  # fmt: skip
    header = ("variant", f"{unit} an update", "p10 – p90", "ratio [95 %]", f"CPU {unit}", "CPU ratio [95 %]", "updates", "loss")
    table(f"{title} ({rounds} rounds)", header, rows)
    blocks = dict(zip(("wall", "cpu"), times, strict=True))
    return {"work": asdict(work), "rounds": rounds, "variants": found, f"blocks_{unit}": blocks}


def untrained(groups: dict[str, Any]) -> bool:
    """True if a loop of a group did not train."""
    return not all(variant["trained"] for group in groups.values() for variant in group["variants"].values())


def at(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of ordered ones lies."""
    return ordered[round(share * (len(ordered) - 1))]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p10": at(ordered, 0.1), "p90": at(ordered, 0.9)}


def interval(paired: Sequence[float]) -> dict[str, float | None]:
    """The middle of paired differences and its 95 % interval, which fewer than six have not."""
    return _written(intervals.middle(paired))


def against(values: Sequence[float], base: Sequence[float]) -> dict[str, dict[str, float | None]]:
    """Difference and ratio to the base variant, each pair from one round."""
    pairs = zip(values, base, strict=True)
    return {"difference": interval([v - b for v, b in pairs]), "ratio": _written(intervals.ratio(values, base))}


def _written(found: intervals.Interval) -> dict[str, float | None]:
    known = math.isfinite(found.high)
    return {"median": found.middle, "low": found.low if known else None, "high": found.high if known else None}


def machine() -> dict[str, Any]:
    """The date, CPU, load and versions, without which a figure means nothing."""
    return {
        "date": date.today().isoformat(),
        "cpu": environment.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: environment.version(name) for name in ("drivetrain", "torch", "lightning", "accelerate", "numpy")},
    }


def parse(doc: str | None, out: str | Path | None, argv: Sequence[str] | None = None, **options: Any) -> argparse.Namespace:
    """The words of a benchmark: an option for each keyword with its default, and `--out`, a file of bench/results without it.

    False is a switch, a type alone an option without a default, a list or a mapping the choices of one that takes several, and
    a tuple those of a word that is needed.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        flag, of = f"--{name.replace('_', '-')}", default if isinstance(default, type) else type(default)
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(name, choices=default)
        elif isinstance(default, list | dict):
            parser.add_argument(flag, nargs="+", choices=list(default) or None, default=list(default))
        else:
            parser.add_argument(flag, type=of, default=None if of is default else default)
    parser.add_argument("--out", type=Path, default=out and RESULTS / out)
    return parser.parse_args(argv)


def before(path: Path) -> dict[str, Any]:
    """The content of a result file, but for the machine: a campaign that was stopped goes on from there."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {key: value for key, value in content.items() if key != "machine"}


def write(path: Path, content: dict[str, Any], indent: int | None = 2) -> None:
    """Write a result file, with the facts of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **content}, indent=indent) + "\n", encoding="utf-8")
    print(f"written to {path}")


def ratio(of: dict[str, float | None], digits: int = 2) -> str:
    """A ratio with its interval where there is one, for a table."""
    return ("{median:.{0}f}" if of["low"] is None else "{median:.{0}f} ({low:.{0}f} … {high:.{0}f})").format(digits, **of)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    print(f"\n{title}")
    Table(header, rows).show()


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of a page in Markdown."""
    return "".join(f"| {' | '.join(words)} |\n" for words in (header, ["---"] * len(header), *rows))


def between(text: str, begin: str, end: str, content: str) -> str:
    """A page with this content between two marks; as it is where it does not have them."""
    before, found, rest = text.partition(begin)
    return before + begin + content + end + rest.partition(end)[2] if found else text


def train(*words: str, inside: Sequence[str] = ()) -> tuple[str, list[dict[str, Any]]]:
    """Train by a command, perhaps within another one: what it printed, and the results of its runs with their time.

    Raises RuntimeError where a run does not complete.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*inside, sys.executable, "-m", "src.train", "-q", *words, f"output_dir={folder}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        results = [{"ended": f.stat().st_mtime, **json.loads(f.read_text())} for f in Path(folder).rglob("result.json")]
    if done.returncode or not results or any(result["status"] != "completed" for result in results):
        raise RuntimeError(f"{' '.join(words)} did not train: {done.returncode} {done.stderr[-800:]}")
    return done.stdout, results


def in_process(work: Callable[..., T], *args: Any) -> T:
    """The result of `work` in a forked process, which shows nothing. Raises NoAnswer, which says why there is none."""
    return answer_of(lambda answer: answer(work(*args)), work.__name__)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            found += map(int, children.read_text().split())
    return found + [each for child in found for each in descendants(child)]


def at_once(rows: Iterable[tuple[Any, ...]], attempt: Callable[..., T], jobs: int, seconds: float = math.inf) -> Iterator[T]:
    """Try rows, some at a time, as far as the seconds last. A row is drawn when it can begin."""
    until, waiting, running = time.monotonic() + seconds, iter(rows), set[Future[T]]()
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            while len(running) < jobs and time.monotonic() < until and (following := next(waiting, None)) is not None:
                running.add(pool.submit(attempt, *following))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)


def place_in(folder: Path, *files: str) -> Path:
    """A new working directory for commands, with these files of tests/support."""
    from tests.support import command

    place = Path(tempfile.mkdtemp(dir=folder))
    for name in files:
        shutil.copy(command.HERE / name, place)
    return place


def fork_commands() -> None:
    """Let every command of drivetrain's that this process starts be forked, with a key to sign runs of its own."""
    state = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, state, ignore_errors=True)
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", XDG_STATE_HOME=state)
    from tests.support import command, fork_server

    fork_server.install()
    command.run("--help", cwd=ROOT)  # the first one waits for the imports
