"""What an arm is worth for the run as it is: its start-up counts, and then as many updates as the run has.

A start is what a process takes beyond its updates at their steady pace: building, compiling, starting readers and ranks, the
first batch. Each round starts a process of each arm. The first one may find nothing in the caches that it fills, above all that
of compiled kernels. The next run on this machine finds what the later rounds found, so these count, and the first is told beside.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from drivetrain.core.cost import Cost
from drivetrain.core.horizon import run_horizon


def updates_of(job: Any, samples: int | None) -> int | None:
    """The updates of a job's whole run over so many samples; None where they are not known."""
    over = run_horizon(job.run, samples) if job is not None else None
    return over.updates if over is not None else None


def usual_starts(starts: Sequence[float]) -> list[float]:
    """The seconds of each round's start with filled caches: the first round counts as the median of the later ones."""
    first, *later = starts
    return [statistics.median(later), *later] if later else [first]


def seconds(arm: Any, updates: int) -> list[float]:
    """What the whole run of so many updates would take by each round of an arm."""
    starts = usual_starts(arm.starts)[: len(arm.blocks)]
    return [Cost(start, b.seconds / b.updates).of(updates) for start, b in zip(starts, arm.blocks, strict=True)]


def speeds(arm: Any, base: Any) -> tuple[list[float], list[float]]:
    """How fast two arms were in each round: whole runs a second, or samples a second where no length is known."""
    lengths = [updates_of(each.job, each.facts.get("samples")) if each.starts else None for each in (arm, base)]
    mine, theirs = (
        [1 / s for s in seconds(each, length)] if length is not None and None not in lengths else [b.rate for b in each.blocks]
        for each, length in zip((arm, base), lengths, strict=True)
    )
    return mine, theirs


def later_start(starts: Sequence[float], base: Sequence[float]) -> float:
    """Seconds by which an arm starts later than `base`, with filled caches; 0 where the rounds do not agree."""
    found = [mine - theirs for mine, theirs in zip(starts, base, strict=False)]
    found = found[1:] or found
    return statistics.median(found) if min(found) > 0 or max(found) < 0 else 0.0
