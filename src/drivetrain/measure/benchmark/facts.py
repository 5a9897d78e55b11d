"""The facts in the files of a finished run. Anyone may have written them: what is not of the right kind is left out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from drivetrain.core.selection import Figure, Reach
from drivetrain.recipe.claim import SETS
from drivetrain.recipe.safe_yaml import printable
from drivetrain.recipe.sections import MAX_CHARACTERS
from drivetrain.run.reader import RunFiles

MEBIBYTE = 2**20


@dataclass
class Facts:
    """Of one training with one seed; None where the run did not measure it."""

    seed: int
    set: str = "test"  # that the run is judged by
    figures: dict[str, dict[str, float]] = field(default_factory=dict)  # set → metric → its value at the end
    # Since the first record, without start-up, which differs between a forked process and an interpreter of its own.
    # None: never reached, or no target was asked for.
    seconds_to_target: float | None = None
    updates_to_target: int | None = None
    reach: str | None = None  # the target, as accuracy>=0.98
    peak_mib: float | None = None  # None also on a CPU whose process did other work before the run
    joules: float | None = None
    data: dict[str, Any] | None = None  # its fingerprint
    kind: str | None = None  # the device's type
    device: str | None = None  # its name
    resumed: bool = False  # several parts: times, memory and energy are not those of one training
    error: str | None = None  # why it did not complete

    @classmethod
    def of(cls, run: RunFiles, seed: int, reach: Reach | None = None) -> Facts:
        """The facts of a run's files."""
        found, result = cls(seed), run.result
        if result is None or run.status != "completed":
            lines = str((result.error if result else "") or "no error message").splitlines()
            found.error = text(f"{run.status}: {lines[0] if lines else ''}")
        if result is None:
            return found
        found.kind, found.device = text(result.device), text(result.device_name or result.device)
        found.resumed = result.resumed_at is not None
        found.data = result.data if isinstance(result.data, dict) else None
        sets = result.metrics if isinstance(result.metrics, dict) else {}
        found.set = next((name for name in SETS if name in sets), "test")
        found.figures = {name: final_figures(sets.get(name)) for name in SETS if name in sets}
        if not found.resumed:
            peak = number(result.peak_memory_bytes) if result.own_process or result.device != "cpu" else None
            found.peak_mib = peak / MEBIBYTE if peak else None
            found.joules = number(result.energy_joules)
        found.reach = str(reach) if reach is not None else None
        if reach is not None and (reached := run.first_reaching(reach.metric, reach.reached)) is not None:
            found.updates_to_target = reached[1]
            found.seconds_to_target = None if found.resumed else reached[0]
        return found


def final_figures(of_set: object) -> dict[str, float]:
    """The figures that a run ends with on a set. A run that averages its weights (ema) is judged by the average."""
    final = of_set.get("final") if isinstance(of_set, dict) else None
    found = final if isinstance(final, dict) else {}
    averaged = {name: str(Figure.parse(name)._replace(averaged=True)) for name in map(str, found)}
    values = {name: number(found.get(averaged[name], found[name])) for name in averaged}
    return {name: value for name, value in values.items() if value is not None}


def number(value: Any) -> float | None:
    """The value, if it is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def text(value: Any) -> str | None:
    """The value as a text that may be shown, and written into a claim."""
    return printable(str(value)).strip()[:MAX_CHARACTERS] or None if value is not None else None
