"""Judges the examples of a kind in a process of its own, which a defect may end."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import threading
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.fuzz.judged import DEFECT, Ended, campaign, summary

KINDS = ("recipes", "commands", "runs", "checkpoints", "datasets")


Share = tuple[str, int, int]  # kind, number of examples, seed

SHARE = 250  # examples of one process
HANGS_S = 240.0  # between the ends of two examples


def _run(kind: str, count: int, seed: int, done: Container[int], connection: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        place = Path(folder) / "place"
        place.mkdir()
        examples = importlib.import_module(f"bench.fuzz.{kind}").examples
        for ended in campaign(examples, place, count, seed, done):
            connection.send(ended)
        connection.send(None)


def _isolated(kind: str, count: int, seed: int, before: Sequence[Ended] = ()) -> list[Ended]:
    """Judge examples in a new process, without those that were judged before and are no defect; one that ends or hangs is one."""
    good = {number: each for number, each in enumerate(before) if each.outcome != DEFECT}
    judged = dict(zip((number for number in range(count) if number not in good), _judged(kind, count, seed, good), strict=False))
    return [each for _, each in sorted({**good, **judged}.items())]


def _judged(kind: str, count: int, seed: int, done: Container[int]) -> list[Ended]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(kind, count, seed, done, theirs))
    process.start()
    theirs.close()
    found: list[Ended] = []
    try:
        while ours.poll(HANGS_S):
            ended = ours.recv()
            if ended is None:
                break
            found.append(ended)
        else:
            found.append(_stopped(kind, seed, found, f"nothing happened for {HANGS_S:.0f} s"))
            process.kill()
    except EOFError:
        process.join()
        found.append(_stopped(kind, seed, found, f"the process ended with code {process.exitcode}"))
    process.join()
    return found


def _stopped(kind: str, seed: int, found: Sequence[Ended], why: str) -> Ended:
    """The example after those that were found, whose process did not come to its end."""
    return Ended(f"{kind} of seed {seed}", DEFECT, f"{why}, at the example after the first {len(found)}")


def run(
    kinds: Sequence[str], count: int, seed: int, jobs: int = 1, journal: Path | None = None, again: bool = False
) -> dict[str, dict[str, Any]]:
    """Judge so many examples of each kind, a share in each process. How many run at a time changes no example.

    Each share that has ended goes to the journal, and a later call with it judges the others, and `again` what was a defect.
    """
    shares = [(kind, min(SHARE, count - begin), seed * 1_000_000 + begin) for begin in range(0, count, SHARE) for kind in kinds]
    found = _before(journal)
    writing = threading.Lock()

    def judge(share: Share) -> None:
        found[share] = _isolated(*share, found.get(share, ()))
        if journal is not None:
            with writing, journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"share": share, "ended": found[share]}) + "\n")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(judge, [share for share in shares if share not in found or (again and _has_defect(found[share]))]))
    return {kind: summary([each for share in shares if share[0] == kind for each in found[share]]) for kind in kinds}


def _has_defect(ended: Iterable[Ended]) -> bool:
    return any(each.outcome == DEFECT for each in ended)


def _before(journal: Path | None) -> dict[Share, list[Ended]]:
    """The shares that earlier calls with this journal have judged."""
    if journal is None or not journal.exists():
        return {}
    rows = map(json.loads, journal.read_text(encoding="utf-8").splitlines())
    return {tuple(row["share"]): [Ended(*each) for each in row["ended"]] for row in rows}
