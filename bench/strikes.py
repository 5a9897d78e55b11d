"""Runs a command and kills it: at a random moment, or at a system call."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.support import command

from bench.syscalls import Tracer

LIMIT_S = 150.0  # of one command; none takes a tenth of it alone


class Kill(NamedTuple):
    """When, how and whom to kill. `at` is a share: of the run's time, or of its calls."""

    way: str  # moment or call
    at: float
    by: str  # SIGKILL or SIGTERM
    whom: str  # all, first or another

    @classmethod
    def drawn(cls, draw: random.Random) -> Kill:
        """A random one."""
        by = "SIGKILL" if draw.random() < 0.7 else "SIGTERM"
        return cls(draw.choice(["moment", "call"]), draw.random(), by, draw.choice(["all", "all", "first", "another"]))


class Reference(NamedTuple):
    """The unbroken run of a combination."""

    run_dir: Path
    seconds: float
    calls: int


class Ended(NamedTuple):
    """A command that has ended, killed or not."""

    code: int | None  # None: it hung
    err: str
    killed: str  # what was killed, and where; empty where it had ended before


def run(words: Sequence[str], place: Path, kill: Kill | None, reference: Reference | None) -> tuple[Ended, int]:
    """Run a command, and kill it. Return how it ended, and how many calls it made that change files."""
    process = command.start("train", "-q", *words, cwd=place, env={"TRACED": "1"})
    struck: list[str] = []

    def strike(task: int | None = None, call: str = "") -> None:
        whom = _kill(process, kill, task) if kill is not None else ""
        if whom and kill is not None:
            struck.append(f"{kill.by} to {whom} {f'before: {call}' if call else f'after {kill.at * reference.seconds:.1f} s'}")

    timer: threading.Timer | None = None
    if kill is not None and reference is not None and kill.way == "call":
        tracer = Tracer(process.pid, place / "outputs", 1 + int(kill.at * reference.calls), strike)
    else:
        tracer = Tracer(process.pid, place / "outputs")
        if kill is not None and reference is not None:
            timer = threading.Timer(kill.at * reference.seconds, strike)
            timer.start()
    try:
        _, err = process.communicate(timeout=LIMIT_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        command.kill_all(process)
        code, err = None, process.communicate()[1]
    if timer is not None:
        timer.cancel()
        timer.join()
    tracer.join(LIMIT_S)
    return Ended(code, err, "; ".join(struck)), tracer.count


def _kill(process: subprocess.Popen[str], kill: Kill, task: int | None) -> str:
    """Send the signal. Return to whom, or nothing if there was nobody."""
    number = signal.Signals[kill.by]
    with suppress(ProcessLookupError):
        if kill.whom == "all":
            os.killpg(process.pid, number)
            return "all"
        others = descendants(process.pid)
        if kill.whom == "first" or not others:
            os.kill(process.pid, number)
            return "the first process"
        random.Random(kill.at).shuffle(others)
        chosen = next((pid for pid in others if pid == task), others[0])  # the one that is at the call, if it is another
        os.kill(chosen, number)
        return f"process {chosen - process.pid} after the first"
    return ""


def descendants(pid: int) -> list[int]:
    """The processes that a process and its threads started, and theirs."""
    found: list[int] = []
    with suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, children.read_text().split()):
                found += [child, *descendants(child)]
    return found
