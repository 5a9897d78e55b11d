"""Base class of the debugging options, and the smallest of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.option import BuildContext, Count, Effect, Option, Positive, RunSpec
from drivetrain.core.order import index_of
from drivetrain.core.step.microbatch import one_update
from drivetrain.core.step.source import PipelineParts, Subset
from drivetrain.core.step.step import Step, Stream, StreamWatcher
from drivetrain.core.world import World

P = TypeVar("P")  # a precision
E = TypeVar("E", bound=PipelineParts)


class Debug(Option, groups.Debug):
    """debug=none: no debugging."""

    why_fixed: ClassVar[str] = "it watches the whole run"
    effect: ClassVar[Effect] = "exact"

    def check_model(self, model: torch.nn.Module, loss: groups.Loss, data: PipelineParts) -> None:
        """Check the model before it is trained, patched or wrapped; `data` gives (x, y) for a request."""

    def choose_data(self, train: E, evaluated: Mapping[str, Mapping[str, E]]) -> Mapping[str, Mapping[str, E]]:
        """Return the pipelines to evaluate, by split and name, given those of the run."""
        return evaluated

    def wrap_precision(self, precision: P) -> P:
        """Return the precision, or a wrapper that observes its methods, the phases of a step."""
        return precision

    def wrap_step(self, step: Step) -> Step:
        """Return the step or a wrapper that observes it."""
        return step

    def stream_watchers(self) -> list[StreamWatcher]:
        """Return functions that wrap the training stream."""
        return []

    def report(self) -> list[str]:
        """Return the findings at the end of the run, one line each."""
        return []


class Fast(Debug):
    """Runs a few updates and evaluation batches, to test that everything works."""

    effect = "changes"
    changes = "the run ends after a few updates"

    def __init__(self, updates: Count = 5, eval_batches: Count = 2) -> None:
        self.updates, self.eval_batches = updates, eval_batches


class Anomaly(Debug):
    """Uses torch's anomaly detection: a NaN in the backward stops the run and names its forward line. Slow."""

    effect = "exact"
    names_backward_lines = True
    step_waits = "torch looks for a NaN in the gradients of each operation"

    def __init__(self, check_nan: bool = True) -> None:
        self.check_nan = check_nan

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.check_nan and run.precision.scales_loss:
            yield (
                f"{run.named('debug')} stops at the first NaN, and {run.named('precision')} makes some on purpose, to find its "
                "scale, and skips them: set precision=bf16 or fp32, or debug.check_nan=false to see forward lines only"
            )

    def setup(self, context: BuildContext) -> None:
        torch.set_anomaly_enabled(True, self.check_nan)
        self._traceback: list[str] = []
        self._showwarning = warnings.showwarning
        warnings.showwarning = self._capture_traceback

    def _capture_traceback(self, message: Warning | str, *rest: Any, **more: Any) -> None:
        """Keep torch's traceback of the forward, which torch issues as a warning."""
        if str(message).startswith("Error detected in"):
            self._traceback += str(message).strip().splitlines()
            if os.environ.get("RANK", "0") == "0":  # only rank 0 reports; the others print it
                return
        self._showwarning(message, *rest, **more)

    def report(self) -> list[str]:
        return [*self._traceback, *(f"debug=anomaly: {line}" for line in _user_frame(self._traceback))]


def _user_frame(traceback: list[str]) -> list[str]:
    """Return the last frame of a forward's traceback outside of torch, as at most one line."""
    frames = [n for n, line in enumerate(traceback) if line.startswith('  File "') and f"{os.sep}torch{os.sep}" not in line]
    return [f"made in {traceback[n].strip()}: {traceback[n + 1].strip()}" for n in frames[-1:] if n + 1 < len(traceback)]


class Overfit(Debug):
    """Trains on the first batch only, evaluates on it, and reports whether the loss gets below `target`.

    If a model cannot overfit one batch, the model, its loss, its learning rate or its labels are wrong.
    """

    effect = "changes"
    changes = "all updates are made with the first batch"
    augments = False

    def __init__(self, updates: Count = 200, target: Positive = 0.1) -> None:
        self.updates, self.target = updates, target

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.augment:
            yield f"debug=overfit leaves {run.named('augment')} out: the batch stays the same"
        if run.ema.active:
            yield f"debug=overfit looks at the raw weights, not at those of {run.named('ema')}"

    def setup(self, context: BuildContext) -> None:
        self._context = context

    def choose_data(self, train: E, evaluated: Mapping[str, Mapping[str, E]]) -> Mapping[str, Mapping[str, E]]:
        context = self._context
        requests = context.batch.requests(context.seed, 0, World(), context.run.data.drop_last)
        batch = torch.cat([request.indices for request in one_update(requests)])
        same = train.reading(Subset(train.source, index_of(batch)))
        return {split: dict.fromkeys(sets, same) for split, sets in evaluated.items()}

    def stream_watchers(self) -> list[StreamWatcher]:
        return [self._repeat_first_update]

    def _repeat_first_update(self, stream: Stream) -> Stream:
        """Yield the first update's micro-batches repeatedly, instead of the stream."""
        stream.close()
        context = self._context
        samples, drop_last = context.batch.order.length, context.run.data.drop_last
        requests = context.batch.requests(context.seed, 0, context.parallel.data_world, drop_last)
        first = one_update(requests)  # from the run's start, even after a resume
        batch = list(context.read(first))
        start, skip = context.progress.epoch, context.progress.window
        for epoch in range(start, context.run.values["epochs"]):
            updates = context.batch.updates(samples, epoch, drop_last)
            for window in range(skip if epoch == start else 0, updates):
                for micro in batch:
                    yield replace(micro, epoch_end=micro.last and window + 1 == updates)

    def report(self) -> list[str]:
        progress = self._context.progress
        if (loss := progress.final.get("loss")) is None:
            return []
        after = f"after {progress.updates} updates on one batch of {len(self._context.judging_data.source)} the loss is"
        if loss < self.target:
            return [f"debug=overfit: {after} {loss:.4g}, below {self.target:g}: model, loss and optimizer can learn"]
        return [
            f"debug=overfit: {after} {loss:.4g}, not below {self.target:g}: something is broken, or needs more debug.updates or "
            "another learning rate. Look at the labels, at detached or frozen parts of the model, at debug=gradcheck"
        ]
