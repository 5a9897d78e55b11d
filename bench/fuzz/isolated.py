"""Judges the examples of a kind in a process of its own, which a defect may end."""

from __future__ import annotations

import importlib
import os
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.fuzz.judged import ACCEPTED, DEFECT, REFUSED, campaign, summary

KINDS = ("recipes", "commands", "runs", "checkpoints", "datasets")


def _run(kind: str, count: int, seed: int, connection: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        place = Path(folder) / "place"
        place.mkdir()
        examples = importlib.import_module(f"bench.fuzz.{kind}").examples
        connection.send(summary(campaign(examples, place, count, seed)))


def run(kind: str, count: int, seed: int) -> dict[str, Any]:
    """Judge examples in a new process, which a defect may end."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(kind, count, seed, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        process.join()
        wrong = [{"made": kind, "outcome": DEFECT, "said": f"the process ended with code {process.exitcode}"}]
        found = {"examples": count, ACCEPTED: 0, REFUSED: 0, DEFECT: 1, "made": {}, "wrong": wrong}
    process.join()
    return found
