"""Kills runs at random moments, goes on with them, and compares their end with that of the unbroken run, bit for bit.

`python -m bench.kills [--kills N] [--seed S] [--jobs N] [--out FILE]`. Linux on x86-64.

A combination is a loader, a strategy, a precision and a way of saving. Those are drawn that pair the most options not yet seen
together, so that about 40 combinations have all pairs. Each is trained once without a break. Then it is killed, gone on with,
perhaps killed again up to three times more, and gone on with to its end. A kill comes

- at a random moment, or at the entry of one of the system calls by which the run changes files (bench/syscalls.py);
- as SIGKILL or SIGTERM;
- to all processes at once, to the one that the user started, or to one of the others: a rank or a loader's worker.

There are six outcomes: same bits, divergent, does not resume, untyped error (a traceback, or an end without a message), hangs,
and, of a combination whose unbroken run fails, does not train. All but the first are faults. The draws are fixed by the seed;
a moment is a share of the unbroken run's time, so where exactly it falls is not.
"""

from __future__ import annotations

import collections
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tests.support import command, same_end, traced

from bench import harness
from bench.syscalls import Tracer

RUN = (
    "data=own", "data.target=traced.Pictures", "trust=[traced]", "model=mlp", "model.hidden=[8,8,8]", "model.dropout=0.2",
    "optimizer=adamw", "scheduler=cosine", "ema=ema", "augment=[flip_crop]", "augment.flip_crop.pad=1",
    "batch.global_batch=12", "updates=14", "log_every=1", "runtime.device=cpu", "runtime.threads=1",
)  # fmt: skip
TRANSFORMER = (
    "model=timm", "model.name=vit_tiny_patch16_224",
    "model.kwargs={img_size: 4, patch_size: 2, depth: 2, embed_dim: 16, num_heads: 4}",
)  # fmt: skip
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "loader": {name: (f"loader={name}",) for name in ("sync", "workers", "threads", "resident", "device", "auto")},
    "parallel": {
        **{name: (f"parallel={name}",) for name in ("single", "ddp", "fsdp", "pipeline")},
        "split": ("parallel=split", "parallel.devices=[cpu,cpu]"),
        **{f"{name} of 4": (f"parallel={name}", "parallel.nproc=4") for name in ("ddp", "fsdp")},
        "pipeline of 4": ("parallel=pipeline", "parallel.nproc=4", "parallel.stages=2"),
        **{f"tensor of {n}": ("parallel=tensor", f"parallel.nproc={n}", *TRANSFORMER) for n in (2, 4)},
    },
    "precision": {name: (f"precision={name}",) for name in ("fp32", "bf16", "amp", "bf16_pure")},
    "saving": {
        "last": (),
        "keep=1": ("saving.keep=1",),
        "best": ("saving=best",),
        "asynchronous": ("saving.asynchronous=true",),
        "sharded": ("saving.sharded=true",),
        "sharded, asynchronous": ("saving.sharded=true", "saving.asynchronous=true"),
    },
}  # fmt: skip
SAVES = "saving.every_updates=2"
KILLS, PER_COMBINATION, MORE_KILLS = 1_000, 6, 3
SAME, DIVERGENT, STUCK, UNTYPED, HANGS = "same bits", "divergent", "does not resume", "untyped error", "hangs"
UNTRAINED = "does not train"
OUTCOMES = SAME, DIVERGENT, STUCK, UNTYPED, HANGS, UNTRAINED
EXPECTED = (0, 1, 75, -signal.SIGKILL, -signal.SIGTERM)  # exit codes of a run that was killed
Names = tuple[str, ...]


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


def run(
    words: Sequence[str], place: Path, kill: Kill | None, reference: Reference | None, hashed: bool = False
) -> tuple[Ended, int]:
    """Run a command, and kill it. Return how it ended, and how many calls it made that change files.

    A `hashed` one writes the hash of every gradient.
    """
    process = command.start("train", "-q", *words, cwd=place, env={"TRACED": "1", "HASHES": str(int(hashed))})
    struck: list[str] = []

    def strike(task: int | None = None, call: str = "") -> None:
        whom = _kill(process, kill, task) if kill is not None else ""
        if whom and kill is not None:
            struck.append(f"{kill.by} to {whom} {f'before: {call}' if call else f'after {kill.at * reference.seconds:.1f} s'}")

    at, after_s = None, 2 * LIMIT_S  # the call, or the moment, at which it is struck
    if kill is not None and reference is not None:
        if kill.way == "call":
            at = 1 + int(kill.at * reference.calls)
        else:
            after_s = kill.at * reference.seconds
    tracer, timer = Tracer(process.pid, place / "outputs", at, strike), threading.Timer(after_s, strike)
    timer.start()
    try:
        _, err = process.communicate(timeout=LIMIT_S)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        command.kill_all(process)
        code, err = None, process.communicate()[1]
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
        others = harness.descendants(process.pid)
        if kill.whom == "first" or not others:
            os.kill(process.pid, number)
            return "the first process"
        random.Random(kill.at).shuffle(others)
        chosen = next((pid for pid in others if pid == task), others[0])  # the one that is at the call, if it is another
        os.kill(chosen, number)
        return f"process {chosen - process.pid} after the first"
    return ""


class Case(NamedTuple):
    """A run that was killed, and what came of it."""

    combination: Names
    kills: list[str]
    outcome: str
    said: str


def words_of(names: Names) -> list[str]:
    """The command line of a combination."""
    chosen = [*itertools.chain(*(TABLE[axis][name] for axis, name in zip(TABLE, names, strict=True)))]
    return [*(word for word in RUN if not (word.startswith("model") and TRANSFORMER[0] in chosen)), *chosen, SAVES]


def combinations(draw: random.Random, folder: Path) -> Iterator[Names]:
    """Yield combinations that can be, those first that show the most new pairs of options; then all others."""
    from drivetrain.core.errors import UserError
    from drivetrain.launch import launcher

    shutil.copy(command.HERE / "traced.py", folder)
    left = list(itertools.product(*TABLE.values()))
    draw.shuffle(left)
    seen: set[tuple[int, int, str, str]] = set()
    while left:
        names = max(left, key=lambda each: len(_pairs(each) - seen))
        left.remove(names)
        with suppress(UserError):  # such as saving.sharded=true of a strategy that cannot
            with chdir(folder):
                launcher.prepare(words_of(names))
            seen |= _pairs(names)
            yield names


def _pairs(names: Names) -> set[tuple[int, int, str, str]]:
    return {(i, j, names[i], names[j]) for i, j in itertools.combinations(range(len(names)), 2)}


def judge(names: Names, reference: Reference, draw: random.Random, folder: Path) -> Case:
    """Kill a run, go on with it, and compare its end."""
    place, kills = harness.place_in(folder, "traced.py"), list[str]()
    try:
        for number in range(2 + MORE_KILLS):
            more = number == 0 or (number <= MORE_KILLS and draw.random() < 0.5)
            kill = Kill.drawn(draw) if more else None
            ended, _ = run(_resume(place, words_of(names)), place, kill, reference, traced.HASHED in names)
            if ended.killed:
                kills.append(ended.killed)
            if (wrong := _wrong(ended)) is not None:
                return Case(names, kills, *wrong)
            if kill is None:
                break
        different = same_end.differences(_newest(place), reference.run_dir)
        left = [p.name for p in (_newest(place) / "checkpoints").glob(".*")]
        if different or left:
            if traced.HASHED in names:  # whose arithmetic is in doubt: both runs' states, and the hash of every gradient
                kept = Path(tempfile.mkdtemp(prefix="drivetrain-kills-"))
                shutil.copytree(place, kept / "killed")
                shutil.copytree(reference.run_dir.parents[2], kept / "unbroken")
                different = [f"(kept in {kept})", *different]
            return Case(names, kills, DIVERGENT, f"{len(different)} differ: {different[:40]}, left behind: {left}")
        return Case(names, kills, SAME, "")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _newest(place: Path) -> Path:
    return max(command.runs(place / "outputs"), key=lambda run_dir: (run_dir / "config.yaml").stat().st_mtime_ns)


def _resume(place: Path, words: list[str]) -> list[str]:
    """The words by which a user goes on: with the run, if it has a record of itself, else by starting again."""
    begun = [run_dir for run_dir in command.runs(place / "outputs") if (run_dir / "environment.json").exists()]
    return [f"resume={begun[-1]}"] if begun else words


def _wrong(ended: Ended) -> tuple[str, str] | None:
    """Return what a run should not end like, and what it said, or None."""
    tail = re.sub(r"/\S*/outputs", "outputs", ended.err.strip())[-600:]
    if ended.code is None:
        return HANGS, tail
    typed = ended.code not in (1, 2) or "error:" in ended.err
    if "Traceback" in ended.err or not typed or ended.code not in (*EXPECTED, 2):
        return UNTYPED, f"exit {ended.code}: {tail}"
    if ended.code == 2 or (ended.code != 0 and not ended.killed):
        return STUCK, f"exit {ended.code}: {tail}"
    return None


def unbroken(names: Names, folder: Path) -> Reference | Case:
    """Train a combination without a break. Return the run, or what came of it where it failed."""
    place = harness.place_in(folder, "traced.py")
    began = time.perf_counter()
    ended, calls = run(words_of(names), place, None, None, traced.HASHED in names)
    if ended.code != 0:
        return Case(names, [], UNTRAINED, f"exit {ended.code}: {ended.err.strip()[-600:]}")
    return Reference(command.only_run(place / "outputs"), time.perf_counter() - began, calls)


def campaign(kills: int, seed: int, jobs: int, limit_s: float = float("inf")) -> list[Case]:
    """Kill so many runs; fewer where the time ends before."""
    cases: list[Case] = []
    counts = enumerate(min(PER_COMBINATION, kills - first) for first in range(0, kills, PER_COMBINATION))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)

        def of_combination(row: tuple[int, int], names: Names) -> list[Case]:
            reference, draw = unbroken(names, folder), random.Random(f"{seed} {row[0]}")
            if isinstance(reference, Case):
                return [reference]
            return [judge(names, reference, draw, folder) for _ in range(row[1])]

        rows = zip(counts, combinations(random.Random(seed), folder))  # noqa: B905 - as many as there are kills
        for case in chain.from_iterable(harness.at_once(rows, of_combination, jobs, limit_s)):
            cases.append(case)
            print(f"{len(cases)} {case.outcome}: {', '.join(case.combination)}: {' | '.join(case.kills)} {case.said}", flush=True)
    return cases


def summary(cases: Sequence[Case]) -> dict[str, dict[str, dict[str, int]]]:
    """The number of each outcome, for each option of each axis."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for at, (axis, options) in enumerate(TABLE.items()):
        for option in options:
            outcomes = collections.Counter(case.outcome for case in cases if case.combination[at] == option)
            found.setdefault(axis, {})[option] = dict(outcomes)
    return found


def main() -> None:
    """Kill, show, write."""
    given = harness.parse(__doc__, "kills-cpu.json", kills=KILLS, seed=0, jobs=2, minutes=float("inf"))
    harness.fork_commands()
    cases = campaign(given.kills, given.seed, given.jobs, 60 * given.minutes)
    table = summary(cases)
    rows = [[f"{axis}={option}", *(str(counts.get(outcome, 0)) for outcome in OUTCOMES)]
            for axis, options in table.items() for option, counts in options.items()]  # fmt: skip
    harness.table(f"{len(cases)} runs", ["option", *OUTCOMES], rows)
    struck = [kill for case in cases for kill in case.kills]
    wrong = [case._asdict() for case in cases if case.outcome != SAME]
    harness.write(given.out, {
        "seed": given.seed, "runs": len(cases), "combinations": len({case.combination for case in cases}),
        "kills": {"total": len(struck), "at a system call": sum("before:" in kill for kill in struck),
                  **{name: sum(kill.startswith(name) for kill in struck) for name in ("SIGKILL", "SIGTERM")},
                  **{name: sum(f"to {name}" in kill for kill in struck) for name in ("all", "the first", "process")}},
        "outcomes": dict(collections.Counter(case.outcome for case in cases)), "options": table, "wrong": wrong,
    })  # fmt: skip
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
