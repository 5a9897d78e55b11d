"""Debugging aids: off in training, one switch when wanted."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, Option, RunSpec
from drivetrain.core.protocols import Loss, Pipeline
from drivetrain.core.step import Step, StreamWatcher

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Debug(Option):
    """debug=none: nothing is installed."""

    updates: int | None = None  # the run stops after so many
    eval_batches: int | None = None
    augments = True  # samples are augmented as the run says
    names_backward_lines = False  # follows the backward line by line

    def check_model(self, model: torch.nn.Module, loss: Loss, data: Pipeline) -> None:
        """Check the model before it is trained, patched or wrapped; `data` gives (x, y) for a request."""

    def choose_data(self, train: Any, test: Any) -> tuple[Any, Any]:
        """The pipelines to train on and to evaluate on, given those of the run."""
        return train, test

    def wrap_precision(self, precision: Any) -> Any:
        """The precision, whose hooks are the phases of a step, or one that watches them."""
        return precision

    def wrap_step(self, step: Step) -> Step:
        """The step, or one that watches it."""
        return step

    def stream_watchers(self) -> list[StreamWatcher]:
        """Functions that the training stream passes through."""
        return []

    def report(self) -> list[str]:
        """The findings, one line each, when the run has ended."""
        return []


class Fast(Debug):
    """A few updates and evaluation batches: does the whole path run?"""

    def __init__(self, updates: Count = 5, eval_batches: Count = 2) -> None:
        self.updates, self.eval_batches = updates, eval_batches


class Anomaly(Debug):
    """torch's anomaly detection: a NaN in the backward stops the run and names the forward line that made it. Slow."""

    names_backward_lines = True

    def __init__(self, check_nan: bool = True) -> None:
        self.check_nan = check_nan

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.check_nan and run.precision.scales_loss:
            yield (
                f"{run.named('debug')} stops at the first NaN, and {run.named('precision')} makes some on purpose, to find its "
                "scale, and skips them: set precision=bf16 or fp32, or debug.check_nan=false to see forward lines only"
            )

    def setup(self, context: BuildContext) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it is slow; whoever asked for it knows
            torch.autograd.set_detect_anomaly(True, check_nan=self.check_nan)
        context.on_exit.callback(torch.autograd.set_detect_anomaly, False)
        self._found: list[str] = []
        self._show = warnings.showwarning
        context.on_exit.callback(setattr, warnings, "showwarning", self._show)
        warnings.showwarning = self._warned

    def _warned(self, message: Warning | str, *rest: Any, **more: Any) -> None:
        """Keep torch's traceback of the forward, which it gives as a warning."""
        if str(message).startswith("Error detected in"):
            self._found += str(message).strip().splitlines()
            if os.environ.get("RANK", "0") == "0":  # others are not asked what they found
                return
        self._show(message, *rest, **more)

    def report(self) -> list[str]:
        return [*self._found, *(f"debug=anomaly: {line}" for line in _last_place(self._found))]


def _last_place(traceback: list[str]) -> list[str]:
    """Of a forward's traceback the last place outside of torch, in one line."""
    places = [n for n, line in enumerate(traceback) if line.startswith('  File "') and f"{os.sep}torch{os.sep}" not in line]
    return [f"made in {traceback[n].strip()}: {traceback[n + 1].strip()}" for n in places[-1:] if n + 1 < len(traceback)]
