"""The stages of a run: where each ends, and which one a run is in. All of it is a pure function of the run's progress."""

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
    """The end of a stage: after so many epochs or updates."""

    epoch: int | None = None
    update: int | None = None

    def reached(self, progress: Progress) -> bool:
        """True if a run has come as far as this."""
        if self.epoch is not None:
            return progress.epoch >= self.epoch
        return self.update is not None and progress.updates >= self.update

    def passed(self, progress: Progress) -> bool:
        """True if a run has gone on from here: its last update is one of the stage after this."""
        if self.epoch is not None:
            return progress.epoch > self.epoch or (progress.epoch == self.epoch and progress.window > 0)
        return self.update is not None and progress.updates > self.update

    def __str__(self) -> str:
        return f"epoch {self.epoch}" if self.epoch is not None else f"update {self.update}"


def ends_at_epoch(until: Length, epochs: int) -> int:
    """The whole number of epochs at which a stage ends that must not end within one: a share of the run rounded, others up."""
    if isinstance(until, str):
        return math.ceil(float(until.removesuffix("ep")))
    return max(1, round(until * epochs))


def boundaries(run: RunSpec, horizon: Horizon) -> list[Boundary]:
    """The end of each stage but the last. They are at the ends of epochs where the stages have other batch sizes."""
    return [_boundary(run, stage.until, horizon) for stage in run.stages[:-1] if stage.until is not None]


def _boundary(run: RunSpec, until: Length, horizon: Horizon) -> Boundary:
    if run.batch.differs_by_stage:
        return Boundary(epoch=ends_at_epoch(until, run.values["epochs"]))
    if isinstance(until, str) and float(until.removesuffix("ep")).is_integer():
        return Boundary(epoch=int(float(until.removesuffix("ep"))))
    return Boundary(update=round(horizon.in_updates(until)))


def alone(run: RunSpec) -> list[tuple[RunSpec, float]]:
    """Each stage as a run without stages, to measure its step, and its share of the run's updates.

    Shares are of the epochs where the length of the run is known only after the data was read. [] for a run without stages.
    """
    found = []
    over = run_horizon(run) or Horizon(run.values["epochs"], range(1, run.values["epochs"] + 1))
    ends = [min(in_updates(end, over), over.updates) for end in boundaries(run, over)]
    for stage, begin, end in zip(run.stages, [0.0, *ends], [*ends, over.updates], strict=False):
        found.append((without(stage.run), (end - begin) / over.updates))
    return found


def set_batches(runs: Sequence[RunSpec]) -> Iterator[str]:
    """Tell the batches of a run and of its stages of each other, where they differ; or why a stage cannot have another one."""
    run = runs[0]
    batches = [stage.run.batch for stage in run.stages]
    if len({batch.sizes() for batch in batches}) < 2:
        return
    if len({(batch.buckets_lengths, batch.pad_to) for batch in batches}) > 1 or any(batch.tokens for batch in batches):
        yield "stages: batch=bucketed, its lengths and batch.tokens are for a whole run: a stage may change batch.global_batch"
        return
    untils = [stage.until for stage in run.stages[:-1] if stage.until is not None]
    for number, until in enumerate(untils):
        if not isinstance(until, str) and (until >= 1 or run.values["updates"] is not None):
            yield (
                f"stages[{number}].until={until}: where stages change the size of the batch, each is made of whole epochs: give "
                "its end in epochs, such as 5ep"
            )
    starts = [0, *(ends_at_epoch(until, run.values["epochs"]) for until in untils)]
    for each in runs:
        each.parts["batch"] = each.batch.of_stages(list(zip(starts, batches, strict=True)))


def set_lengths(run: RunSpec) -> Iterator[str]:
    """Let a stage with another data.length read the first tokens of the run's own samples; or tell why it cannot."""
    whole: int | None = getattr(run.data, "length", None)
    for number, stage in enumerate(run.stages):
        length, setting = getattr(stage.run.data, "length", None), f"stages[{number}].data.length"
        if length is None or whole is None or length == whole:
            continue
        if length > whole:
            yield f"{setting}={length} is longer than the run's samples: set data.length={length}, and less in the other stages"
        elif run.data.targets != "tokens" or run.data.has_prompts:
            yield f"{setting}={length} cuts texts to be continued, and {run.named('data')} gives others here: leave it out"
        elif run.batch.tokens or run.batch.buckets_lengths:
            yield f"{setting}={length}: batch.tokens and batch=bucketed count whole samples: set batch=fixed batch.tokens=null"
        else:
            stage.run.parts["data"] = stage.run.data.with_values(length=whole, reads_up_to=length)


def problems(run: RunSpec) -> Iterator[str]:
    """The reasons why a run cannot have these stages, as far as they are known before the data is read."""
    tried = {group: (stage.run, option) for stage in run.stages for group, option in stage.run.tried().items()}
    for group, (of_stage, option) in tried.items():
        yield (
            f"stages and {of_stage.named(group)} exclude each other, as trials choose of it once for the whole run: set "
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
    """The reasons why a run of this horizon cannot have these boundaries: they are not in order, or are not within it."""
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
            yield f"{name} is {_updates(end)}, {why}: a stage has one update at the least, and the boundaries ascend"
        before, name_before = max(before, end), f"update {end:,.0f}"


def in_updates(boundary: Boundary, horizon: Horizon) -> float:
    """The number of updates that are made when a run comes to a boundary."""
    if boundary.epoch is not None:
        return horizon.in_updates(f"{boundary.epoch}ep")
    return float(boundary.update or 0)


def number_at(ends: Sequence[Boundary], progress: Progress) -> int:
    """The number of the stage that a run is in, from 0."""
    return next((number for number, end in enumerate(ends) if not end.reached(progress)), len(ends))


def number_that_made(ends: Sequence[Boundary], progress: Progress) -> int:
    """The number of the stage that made a run's last update, whose settings it was evaluated with."""
    return next((number for number, end in enumerate(ends) if not end.passed(progress)), len(ends))


def changes_at(run: RunSpec, update: int) -> Mapping[str, object]:
    """The changes of the stage that made an update; of the last stage where only the data tells how long the run is."""
    over = run_horizon(run)
    ends = [in_updates(end, over) for end in boundaries(run, over)] if over is not None else []
    return run.stages[bisect_left(ends, update) if over is not None else -1].changes if run.stages else {}


def without(run: RunSpec) -> RunSpec:
    """The options of a run, or of a stage, as those of a run without stages."""
    return replace(run.with_parts(batch=run.batch.of_stages([])), stages=[]) if run.stages else run


def _updates(end: float) -> str:
    return f"update {end:,.0f}"
