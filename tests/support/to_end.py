"""Runs that must come to an end that the test names."""

from collections.abc import Sequence
from pathlib import Path

import drivetrain
from drivetrain.run.result import Result


def run_to_end(words: Sequence[str], updates: int | None = None, ends: str = "completed") -> Result:
    """Train with these words. The run must end with this status, and after as many updates where they are given."""
    result = drivetrain.train(list(words))
    assert result.status == ends, f"{result.status}: {result.error}"
    assert ends != "completed" or result.error is None
    assert updates in (None, result.updates), f"{result.updates} updates: {result.error}"
    return result


def continued(run_dir: Path, *words: str, updates: int | None = None, ends: str = "completed") -> Result:
    """Resume a run, which must end in the same way."""
    return run_to_end([f"resume={run_dir}", *words], updates, ends)
