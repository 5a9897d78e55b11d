"""The objective of a sweep: the loss's metric at its best evaluation, which decides which job is the best one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.config.hydra_idioms import is_hydra_override
from drivetrain.core.files import write_json
from drivetrain.core.option import RunSpec
from drivetrain.core.selection import selected
from drivetrain.run import environment
from drivetrain.run.result import Result
from drivetrain.sweeps.store import FINAL, Entry, Sweep
from drivetrain.ui import terminal
from drivetrain.ui.output import echo


@dataclass
class Objective:
    """A metric, and whether it is maximized."""

    metric: str
    maximize: bool

    @classmethod
    def of(cls, run: RunSpec) -> Objective:
        """The objective that ranks a run's models."""
        selection = selected(run)
        return cls(selection.name, selection.maximize)

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """As optuna names it."""
        return "maximize" if self.maximize else "minimize"

    def value(self, result: Result | None) -> float | None:
        """The value at a run's best evaluation; None where the run did not complete, or the value is not finite."""
        value = result.judged("best").get(self.metric) if result is not None and result.status == "completed" else None
        return value if value is not None and math.isfinite(value) else None

    def best(self, entries: Sequence[Entry]) -> Entry | None:
        """The best job; the first of equal ones."""
        values = [(entry, value) for entry in entries if (value := self.value(entry.result)) is not None]
        if not values:
            return None
        return (max if self.maximize else min)(values, key=lambda pair: pair[1])[0]


def common(entries: Sequence[Entry]) -> Objective | None:
    """The objective of all the jobs; None where their losses have different ones."""
    found = [Objective.of(e.job.job.run) for e in entries if e.job.job is not None]
    return found[0] if found and all(o == found[0] for o in found) else None


def write(sweep: Sweep, objective: Objective | None, seconds: float, finished: bool) -> None:
    """Write sweep.json: the jobs with their statuses, objectives and times, and the best one."""
    best = objective.best(sweep.entries) if objective else None
    content = {
        "finished": finished,
        "overrides": [environment.redact(o) for o in sweep.overrides],
        "objective": {"metric": objective.metric, "direction": objective.direction} if objective else None,
        "best": best.number if best else None,
        "wall_s": seconds,
        "jobs": [_row(entry, objective) for entry in sweep.entries],
    }
    write_json(sweep.path / "sweep.json", content)


def _row(entry: Entry, objective: Objective | None) -> dict[str, Any]:
    result = entry.result
    return {
        "job": entry.number,
        "overrides": [environment.redact(o) for o in entry.job.overrides],
        "status": result.status if result else None,  # null: it has not run, or still runs elsewhere
        "objective": objective.value(result) if objective else None,
        "wall_s": result.wall_s if result else None,
    }


def show(sweep: Sweep, objective: Objective | None) -> None:
    """Print the jobs as a table, and the best of them as a command to copy."""
    best = objective.best(sweep.entries) if objective else None
    jobs = [(e.number, e.job.label, e.result) for e in sweep.entries if e.result is not None]
    terminal.show_jobs(jobs, objective.metric if objective else None, best.number if best else None)
    if objective is None or best is None or best.result is None:
        return
    overrides = shlex.join(o for o in best.job.overrides if not is_hydra_override(o))
    value = terminal.number(objective.value(best.result) or 0.0) + best.result.when(best.result.judged("best"))
    what = f"{best.result.judged_by} {objective.metric}"
    echo(f"\nbest: job {best.number}, {what} {value} ({best.job.label or 'the only one'})")
    dirs = "".join(f"--config-dir {shlex.quote(folder)} " for folder in sweep.config_dirs)
    echo(f"  drivetrain train {dirs}{overrides}")
    echo(f"  its recipe: {best.run_dir / 'recipe.yaml'}")


def all_final(entries: Sequence[Entry]) -> bool:
    """Whether no job is left to run."""
    return all(e.result is not None and e.result.status in FINAL for e in entries)
