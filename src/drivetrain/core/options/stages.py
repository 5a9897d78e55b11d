"""The stages of a run: the end of each, and the current one. All are pure functions of the run's progress."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from drivetrain.core.options.allowed import Length
from drivetrain.core.options.horizon import Horizon, Progress, run_horizon
from drivetrain.core.options.run_spec import RunSpec


class Boundary(NamedTuple):
    """The end of a stage: after this many epochs or updates."""

    epoch: int | None = None
    update: int | None = None

    def reached(self, progress: Progress) -> bool:
        """True if a run has reached this boundary."""
        if self.epoch is not None:
            return progress.epoch >= self.epoch
        return self.update is not None and progress.updates >= self.update

    def passed(self, progress: Progress) -> bool:
        """True if a run has passed this boundary: its last update belongs to a later stage."""
        if self.epoch is not None:
            return progress.epoch > self.epoch or (progress.epoch == self.epoch and progress.window > 0)
        return self.update is not None and progress.updates > self.update

    def __str__(self) -> str:
        return f"epoch {self.epoch}" if self.epoch is not None else f"update {self.update}"


def ends_at_epoch(until: Length, epochs: int) -> int:
    """The epoch at which a stage of whole epochs ends: a share of the run is rounded, other lengths are rounded up."""
    if isinstance(until, str):
        return math.ceil(float(until.removesuffix("ep")))
    return max(1, round(until * epochs))


def boundaries(run: RunSpec, horizon: Horizon) -> list[Boundary]:
    """The end of each stage but the last. Where the batch size differs between stages, they end with an epoch."""
    return [_boundary(run, stage.until, horizon) for stage in run.stages[:-1] if stage.until is not None]


def _boundary(run: RunSpec, until: Length, horizon: Horizon) -> Boundary:
    if run.batch.differs_by_stage:
        return Boundary(epoch=ends_at_epoch(until, run.values["epochs"]))
    if isinstance(until, str) and float(until.removesuffix("ep")).is_integer():
        return Boundary(epoch=int(float(until.removesuffix("ep"))))
    return Boundary(update=round(horizon.in_updates(until)))


def alone(run: RunSpec) -> list[tuple[RunSpec, float]]:
    """Each stage as a run without stages, to measure its step, and its share of the run's updates.

    Shares count epochs where only the data gives the length of the run. [] for a run without stages.
    """
    found = []
    over = run_horizon(run) or Horizon(run.values["epochs"], range(1, run.values["epochs"] + 1))
    ends = [min(in_updates(end, over), over.updates) for end in boundaries(run, over)]
    for stage, begin, end in zip(run.stages, [0.0, *ends], [*ends, over.updates], strict=False):
        found.append((without(stage.run), (end - begin) / over.updates))
    return found


def set_batches(runs: Sequence[RunSpec]) -> Iterator[str]:
    """Link the batches of a run and its stages, where they differ; or yield why a stage cannot have another one."""
    run = runs[0]
    batches = [stage.run.batch for stage in run.stages]
    if len({batch.sizes() for batch in batches}) < 2:
        return
    if len({(batch.buckets_lengths, batch.pad_to) for batch in batches}) > 1 or any(batch.tokens for batch in batches):
        yield "stages: batch=bucketed, its lengths and batch.tokens apply to a whole run: a stage may change batch.global_batch"
        return
    untils = [stage.until for stage in run.stages[:-1] if stage.until is not None]
    for number, until in enumerate(untils):
        if not isinstance(until, str) and (until >= 1 or run.values["updates"] is not None):
            yield (
                f"stages[{number}].until={until}: where stages change the size of the batch, each has whole epochs: give "
                "its end in epochs, such as 5ep"
            )
    starts = [0, *(ends_at_epoch(until, run.values["epochs"]) for until in untils)]
    for each in runs:
        each.parts["batch"] = each.batch.of_stages(list(zip(starts, batches, strict=True)))


def set_lengths(run: RunSpec) -> Iterator[str]:
    """Let a stage with another data.length read the first tokens of the run's own samples; or yield the reason why it cannot."""
    whole: int | None = getattr(run.data, "length", None)
    for number, stage in enumerate(run.stages):
        length, setting = getattr(stage.run.data, "length", None), f"stages[{number}].data.length"
        if length is None or whole is None or length == whole:
            continue
        if length > whole:
            yield f"{setting}={length} is longer than the run's samples: set data.length={length}, and less in the other stages"
        elif run.data.targets != "tokens" or run.data.has_prompts:
            yield f"{setting}={length} cuts texts to be continued, and {run.named('data')} has other inputs here: leave it out"
        elif run.batch.tokens or run.batch.buckets_lengths:
            yield f"{setting}={length}: batch.tokens and batch=bucketed count whole samples: set batch=fixed batch.tokens=null"
        else:
            stage.run.parts["data"] = stage.run.data.with_values(length=whole, reads_up_to=length)


def problems(run: RunSpec) -> Iterator[str]:
    """The reasons why a run cannot have these stages, as far as they are known before the data is read."""
    tried = {group: (stage.run, option) for stage in run.stages for group, option in stage.run.tried().items()}
    for group, (of_stage, option) in tried.items():
        yield (
            f"stages and {of_stage.named(group)} exclude each other, as trials set it once for the whole run: set "
            f"{option.untried}"
        )
    for number, stage in enumerate(run.stages):
        if isinstance(stage.until, float) and stage.until == 1:
            yield (
                f"stages[{number}].until=1.0 could be the whole run or one update: the last stage needs no end; give one update "
                "as 1, and a share of the run below 1"
            )
    if run.stages and run.debug.updates is None and (horizon := run_horizon(run)) is not None:
        yield from boundary_problems(run, horizon)


def boundary_problems(run: RunSpec, horizon: Horizon) -> Iterator[str]:
    """The reasons why a run of this horizon cannot have these boundaries: out of order, or beyond the run."""
    before, name_before = 0.0, ""
    for number, (stage, boundary) in enumerate(zip(run.stages, boundaries(run, horizon), strict=False)):
        name, end = f"stages[{number}].until={stage.until}", in_updates(boundary, horizon)
        if end >= horizon.updates:
            yield (
                f"{name} is {_updates(end)}, and the run ends after {horizon.updates:,}: set it below that; the last stage needs "
                "none"
            )
        elif end <= before:
            why = f"not after {name_before}, where the stage before it ends" if name_before else "the start of the run"
            yield f"{name} is {_updates(end)}, {why}: a stage has at least one update, and the boundaries ascend"
        before, name_before = max(before, end), f"update {end:,.0f}"


def in_updates(boundary: Boundary, horizon: Horizon) -> float:
    """The number of updates made when a run reaches a boundary."""
    if boundary.epoch is not None:
        return horizon.in_updates(f"{boundary.epoch}ep")
    return float(boundary.update or 0)


def number_at(ends: Sequence[Boundary], progress: Progress) -> int:
    """The number of the stage that a run is in, from 0."""
    return next((number for number, end in enumerate(ends) if not end.reached(progress)), len(ends))


def number_that_made(ends: Sequence[Boundary], progress: Progress) -> int:
    """The number of the stage of a run's last update; the evaluation used its settings."""
    return next((number for number, end in enumerate(ends) if not end.passed(progress)), len(ends))


def changes_at(run: RunSpec, update: int) -> Mapping[str, object]:
    """The changes of the stage that made an update; of the last stage where only the data gives the run's length."""
    over = run_horizon(run)
    ends = [in_updates(end, over) for end in boundaries(run, over)] if over is not None else []
    return run.stages[bisect_left(ends, update) if over is not None else -1].changes if run.stages else {}


def without(run: RunSpec) -> RunSpec:
    """The options of a run or a stage, as a run without stages."""
    return replace(run.with_parts(batch=run.batch.of_stages([])), stages=[]) if run.stages else run


def _updates(end: float) -> str:
    return f"update {end:,.0f}"
