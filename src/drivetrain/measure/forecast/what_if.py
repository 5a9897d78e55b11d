"""What if: the same run with one technique more, forecast in the same way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from drivetrain.core.blocks import blocks_for
from drivetrain.core.errors import UserError
from drivetrain.measure.forecast.devices import HERE
from drivetrain.measure.forecast.examine import Forecast, Subject, examine
from drivetrain.measure.forecast.plan import Plan, plan
from drivetrain.measure.overrides import apply, groups_of

GAIN = 1.1  # that counts as help: timings of the same operations differ by some per cent
ROW_S = 1.0  # of timing operations that are new in a row
RANKS = (2, 8)
SAME_MODEL = {"compile", "parallel", "batch"}  # groups that change nothing of the trainer as it is built to be looked at
RECOMPUTED = "checkpointing=blocks"  # its step is that of the trainer as it is, with all its blocks recomputed
FITTING = (RECOMPUTED, "batch=", "parallel=")  # most memory for least time and machines


@dataclass
class Row:
    """One override, and what it changes: the ratios of samples a second and of peak memory to the run's."""

    override: str
    speed: float | None = None
    memory: float | None = None
    step_s: float | None = None
    peak_bytes: float | None = None
    fits: bool | None = None
    why_not: str = ""  # it is not forecast


def candidates(run_plan: Plan) -> Iterator[str]:
    """Overrides that change speed or memory, and not what is trained, as far as the run does not have them.

    First what usually helps most for the time that its forecast takes: there may be no time for all.
    """
    run = run_plan.run
    if not run.compile.active:
        yield "compile=inductor"
    if run.precision.full_float32:
        yield "precision=bf16"
    if run.parallel.one_process and run_plan.device != HERE:
        for ranks in RANKS:
            yield f"parallel=fsdp parallel.nproc={ranks}"
    if not run.checkpointing.active:
        yield RECOMPUTED
    if run.batch.fixed_micro_batches and run.batch.size(0) % (2 * run_plan.micro_batches()) == 0:
        yield f"batch=accumulate batch.accumulation_steps={2 * run_plan.micro_batches()}"
    yield "checkpointing=none" if run.checkpointing.active else "checkpointing=selective"


def table(base: Forecast, subject: Subject, until: float) -> list[Row]:
    """Forecast each candidate that should be done in time, going by what others of its kind took; the others say so.

    Of a run that does not fit those come first that may make it fit, and the quick ones of them are forecast until one does.
    """
    rows, longest = [], {True: 0.0, False: 0.0}
    sought = not base.fits
    for override in sorted(candidates(subject.plan), key=_fitting if sought else lambda _: 0):
        began, rebuilt = time.perf_counter(), not _same_model(override)
        if began + longest[rebuilt] > until and (rebuilt or not sought):
            rows.append(Row(override, why_not="not forecast: the time was up (seconds=60 gives it more)"))
            continue
        rows.append(_row(override, base, subject))
        sought = sought and not rows[-1].fits
        longest[rebuilt] = max(longest[rebuilt], time.perf_counter() - began)
    return rows


def _fitting(override: str) -> int:
    return next((n for n, start in enumerate(FITTING) if override.startswith(start)), len(FITTING))


def _same_model(override: str) -> bool:
    return override.startswith(RECOMPUTED) or groups_of(override.split()) <= SAME_MODEL


def _row(override: str, base: Forecast, subject: Subject) -> Row:
    own = subject.plan
    try:
        changed = _changed(own, override)
        if changed.run.batch.size(0) != own.run.batch.size(0):  # another option has another default, or misses a preset's
            override += f" batch.global_batch={own.run.batch.size(0)}"
            changed = _changed(own, override)
        if override.startswith(RECOMPUTED):
            blocks = blocks_for(RECOMPUTED, "checkpointing.block", subject.trainer.model, None)
            found = examine(replace(subject, plan=changed, blocks=blocks, recomputed=len(blocks)), ROW_S)
        elif _same_model(override):
            found = examine(replace(subject, plan=changed), ROW_S)
        else:
            built = replace(Subject.build(changed), timed=subject.timed)
            with built.on_exit:
                found = examine(built, ROW_S)
    except UserError as error:
        return Row(override, why_not=error.problems[0])
    step, peak = found.step.value, found.memory.peak.value
    return Row(override, base.step.value / step, peak / base.memory.peak.value, step, peak, found.fits)


def _changed(own: Plan, override: str) -> Plan:
    changed = plan(apply(own.overrides, override.split(), own.config_dirs), own.config_dirs, own.device)
    return replace(changed, steps=own.steps)


def best(rows: list[Row]) -> tuple[Row | None, Row | None]:
    """The rows that help most in time and in memory; None where no row helps."""
    told = [row for row in rows if row.speed is not None and row.memory is not None]
    # More micro-batches compute no less: what they seem to save is the error of timing other shapes.
    faster = max((r for r in told if not r.override.startswith("batch=")), key=lambda row: row.speed or 0, default=None)
    smaller = min(told, key=lambda row: row.memory or 1, default=None)
    return (
        faster if faster is not None and (faster.speed or 0) > GAIN else None,
        smaller if smaller is not None and (smaller.memory or 1) < 1 / GAIN else None,
    )
