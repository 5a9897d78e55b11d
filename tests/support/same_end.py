"""Compares two runs that should have come to the same end, bit for bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain.measure.rehearse import flat
from drivetrain.run.result import Result
from tests.support.command import losses, records, result, weights

RESULT = ("status", "error", "metrics", "updates", "epochs", "world_size", "config_hash")


def saved(run_dir: Path) -> dict[str, Any]:
    """All that the newest checkpoint holds, whole or in shards."""
    from drivetrain.saving import checkpoint_io, manifest

    newest, problems = manifest.newest_valid(run_dir)
    assert newest is not None, problems
    weights, state = checkpoint_io.load(newest)
    return flat({"update": newest.name, "weights": weights, "state": state})


def resumed(words: Sequence[str], stop: int, end: int, *again: str) -> tuple[Result, Result]:
    """A run of `end` updates, and one of `stop` that was resumed to as many; both have the same weights in the end."""
    whole, part = (drivetrain.train([*words, f"updates={updates}"]) for updates in (end, stop))
    rest = drivetrain.train([f"resume={part.run_dir}", f"updates={end}", *again])
    for run, updates in ((whole, end), (part, stop), (rest, end)):
        assert (run.status, run.updates) == ("completed", updates), run.error
    assert weights(rest.run_dir) == weights(whole.run_dir)
    return whole, rest


def differences(run_dir: Path, unbroken: Path) -> list[str]:
    """The differences: each update's loss once, evaluations, the result, and all that was saved."""
    found = [name for name, read in (
        ("losses", losses), ("evaluations", lambda run: records(run, "evaluate")),
        ("result", lambda run: {key: result(run)[key] for key in RESULT}),
    ) if read(run_dir) != read(unbroken)]  # fmt: skip
    ours, theirs = saved(run_dir), saved(unbroken)
    return found + [name for name in sorted({*ours, *theirs}) if ours.get(name, "nothing") != theirs.get(name, "nothing")]
