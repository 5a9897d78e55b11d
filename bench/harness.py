"""Shared by the benchmarks: interleaved variants in live processes, paired statistics, facts of the machine, a table.

A machine's speed drifts by more than what is measured here, so no variant runs alone: each lives in a process of its own
(so that one library's imports and patches do not affect another), and all run short blocks in the order A B C … C B A.
Ratios are taken between blocks of the same round.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import pty
import random
import shutil
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from drivetrain.run import environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


class Done(BaseException):
    """There are no more blocks. Not an Exception, so that no loop under test handles it as an error of training."""


class BlockSync:
    """A variant's side of the interleaving: called at the end of every block, it returns when the next one may run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._began: tuple[float, float] | None = None

    def watch(self, loss: Callable[[], float]) -> None:
        """`loss` is read before the first block and after the last: the marker that the variant trained."""
        self._loss, self._first = loss, loss()

    def mark(self, first: float) -> None:
        """The first marker, where it is known only once the first block is under way."""
        self._first = first

    def __call__(self, updates: int) -> None:
        """Hand over the block's time; `updates` is the variant's own count of all it made. Raises Done after the last."""
        now = _clocks()
        self._connection.send(None if self._began is None else tuple(b - a for a, b in zip(self._began, now, strict=True)))
        if self._connection.recv() == "stop":
            self._connection.send({"updates": updates, "loss_first": self._first, "loss_last": self._loss()})
            raise Done
        self._began = _clocks()


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
        self._connection, theirs = context.Pipe()
        # No daemon: a loader's variant has workers of its own.
        self._process = context.Process(target=_serve, args=(run, args, theirs, terminal), daemon=False)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the variant has built what it trains."""
        self._receive()

    def block(self) -> tuple[float, float]:
        """Run one block; its seconds by the wall and on the CPU."""
        self._connection.send("go")
        return self._receive()

    def stop(self) -> dict[str, Any]:
        """End the variant; its marker."""
        self._connection.send("stop")
        marker = self._receive()
        self._process.join(10)
        return marker

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


def run_rounds(
    variants: dict[str, tuple[Callable[..., None], tuple[Any, ...]]], rounds: int, warmup: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, dict[str, Any]]]:
    """Seconds (wall, CPU) of each variant's blocks, one a round, and its marker. The order alternates between rounds."""
    with _screen() as terminal:
        live = [Variant(name, run, args, terminal) for name, (run, args) in variants.items()]
        try:
            for variant in live:
                variant.ready()
            seconds: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in live}
            for number in range(warmup + rounds):
                for variant in live if number % 2 == 0 else reversed(live):
                    taken = variant.block()
                    if number >= warmup:
                        seconds[variant.name].append(taken)
            return seconds, {variant.name: variant.stop() for variant in live}
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


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[round(share * (len(ordered) - 1))]

    return {"median": statistics.median(ordered), "p10": at(0.1), "p90": at(0.9)}


def interval(paired: Sequence[float], resamples: int = 2000) -> dict[str, float]:
    """The median of paired values and its 95 % interval, by bootstrap over the pairs (Efron 1979)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(paired, k=len(paired))) for _ in range(resamples))
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return {"median": statistics.median(paired), "low": low, "high": high}


def against(values: Sequence[float], base: Sequence[float]) -> dict[str, dict[str, float]]:
    """Difference and ratio to the base variant, each pair from one round."""
    pairs = list(zip(values, base, strict=True))
    return {"difference": interval([v - b for v, b in pairs]), "ratio": interval([v / b for v, b in pairs])}


def machine() -> dict[str, Any]:
    """CPU, load and versions: what a figure means nothing without."""
    return {
        "cpu": environment.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("drivetrain", "torch", "lightning", "accelerate", "numpy")},
    }


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def parse(doc: str | None, out: str | Path, argv: Sequence[str] | None = None, **options: Any) -> argparse.Namespace:
    """The words of a benchmark: an option for each keyword with its default, and `--out`, a file of bench/results without it.

    False is a switch, a type alone an option without a default, a list or a mapping the choices of one that takes several.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in options.items():
        flag, of = f"--{name.replace('_', '-')}", default if isinstance(default, type) else type(default)
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list | dict):
            parser.add_argument(flag, nargs="+", choices=list(default) or None, default=list(default))
        else:
            parser.add_argument(flag, type=of, default=None if of is default else default)
    parser.add_argument("--out", type=Path, default=RESULTS / out)
    return parser.parse_args(argv)


def before(path: Path) -> dict[str, Any]:
    """What a result file holds already: a campaign that was stopped goes on from there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a result file, with the facts of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **content}, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


def ratio(of: dict[str, float]) -> str:
    """A ratio with its interval, for a table."""
    return f"{of['median']:.2f} ({of['low']:.2f} … {of['high']:.2f})"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column left, the others right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left")
    for number, name in enumerate(header):
        grid.add_column(name, justify="right" if number else "left")
    for row in rows:
        grid.add_row(*map(Text, row))  # plain: [channels_last] is no markup
    console = Console()
    Console(width=console.width if console.is_terminal else 140).print(grid)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of a page in Markdown."""
    return "".join(f"| {' | '.join(words)} |\n" for words in (header, ["---"] * len(header), *rows))


def between(text: str, begin: str, end: str, content: str) -> str:
    """A page with this content between two marks; as it is where it does not have them."""
    before, found, rest = text.partition(begin)
    return before + begin + content + end + rest.partition(end)[2] if found else text


def fork_commands() -> None:
    """Let every command of drivetrain's that this process starts be forked, with a key to sign runs of its own."""
    state = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, state, ignore_errors=True)
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", XDG_STATE_HOME=state)
    from tests.support import command, fork_server

    fork_server.install()
    command.run("--help", cwd=ROOT)  # the first one waits for the imports
