"""What a sweep's jobs are judged by: the loss's metric at its best. It says which job is the best one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.core.files import write_json
from drivetrain.core.option import RunSpec
from drivetrain.run import environment
from drivetrain.run.result import Result
from drivetrain.sweep.options import is_hydras
from drivetrain.sweep.store import FINAL, Entry, Sweep
from drivetrain.ui import terminal


@dataclass
class Objective:
    """A metric, and whether more of it is better."""

    metric: str
    more: bool

    @classmethod
    def of(cls, run: RunSpec) -> Objective:
        """The loss's own."""
        metric, better = run.loss.best
        return cls(metric, better(0.0, 1.0) == 1.0)

    def value(self, result: Result | None) -> float | None:
        """A run's, at its best evaluation; None where it did not complete, or came to no number."""
        value = result.metrics["best"].get(self.metric) if result is not None and result.status == "completed" else None
        return value if value is not None and math.isfinite(value) else None

    def best(self, entries: Sequence[Entry]) -> Entry | None:
        """The best job: of equals, the first."""
        having = {e.number: (e, v) for e in entries if (v := self.value(e.result)) is not None}
        if not having:
            return None
        entry, _ = (max if self.more else min)(having.values(), key=lambda pair: pair[1])
        return entry


def common(entries: Sequence[Entry]) -> Objective | None:
    """The objective of all the jobs; None where their losses have different ones."""
    found = [Objective.of(e.job.job.run) for e in entries if e.job.job is not None]
    return found[0] if found and all(o == found[0] for o in found) else None


def write(sweep: Sweep, objective: Objective | None, seconds: float, finished: bool) -> None:
    """sweep.json: the jobs, how each ended, what it came to and in which time, and which one is the best."""
    best = objective.best(sweep.entries) if objective else None
    about = {"metric": objective.metric, "direction": "maximize" if objective.more else "minimize"} if objective else None
    content = {
        "finished": finished,
        "words": [environment.redact(w) for w in sweep.words],
        "objective": about,
        "best": best.number if best else None,
        "wall_s": seconds,
        "jobs": [_row(entry, objective) for entry in sweep.entries],
    }
    write_json(sweep.path / "sweep.json", content)


def _row(entry: Entry, objective: Objective | None) -> dict[str, Any]:
    result = entry.result
    return {
        "job": entry.number,
        "overrides": [environment.redact(w) for w in entry.job.words],
        "status": result.status if result else None,  # null: it never ran, or runs elsewhere still
        "objective": objective.value(result) if objective else None,
        "wall_s": result.wall_s if result else None,
    }


def show(sweep: Sweep, objective: Objective | None) -> None:
    """The jobs in a table, and the best of them as a command to copy."""
    terminal.show_jobs([(e.number, e.job.label, e.result) for e in sweep.entries if e.result is not None])
    best = objective.best(sweep.entries) if objective else None
    if objective is None or best is None:
        return
    words = shlex.join(w for w in best.job.words if not is_hydras(w))
    value = terminal.number(objective.value(best.result) or 0.0)
    print(f"\nbest: job {best.number}, {objective.metric} {value} ({best.job.label or 'the only one'})")
    print(f"  drivetrain train {words}")
    print(f"  its recipe: {best.run_dir / 'recipe.yaml'}", flush=True)


def all_final(entries: Sequence[Entry]) -> bool:
    """Whether nothing is left to run."""
    return all(e.result is not None and e.result.status in FINAL for e in entries)
