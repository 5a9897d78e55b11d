"""Callbacks: the user's code that is called at the events of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from drivetrain.core.lazy import torch
from drivetrain.core.typed import JsonMapping

PLAIN, AVERAGE = "plain", "average"  # the weights that are evaluated


def _nothing(*given: object) -> None:
    """Take anything and do nothing."""


@dataclass(frozen=True)
class Event:
    """The facts that a callback gets, all read-only."""

    run_dir: Path
    config: Mapping[str, object]  # by dotted key, as "optimizer.lr", without machine-local keys
    update: int  # updates made so far
    epoch: int  # epochs completed so far
    samples: int  # samples trained on, as of the last log point
    metrics: JsonMapping  # at an update its record's (loss, lr, …), else the last evaluation's
    best: Mapping[str, float]  # the metrics of the best evaluation so far, and its update
    status: str = "running"  # at the end: completed, failed, diverged or interrupted
    model: torch.nn.Module | None = None  # the step's model; only for a callback that `needs_model`
    weights: Sequence[str] = (PLAIN,)  # the evaluated ones: plain, and average if the run keeps one
    # Returns a context in which `model` holds the weights of this name, ready for use; None: the average, if there is one.
    eval_model: Callable[..., AbstractContextManager[torch.nn.Module]] = field(default=nullcontext, repr=False)
    log: Callable[[Mapping[str, float]], None] = field(default=_nothing, repr=False)  # adds figures to the run's metrics
    log_image: Callable[[str, Path], None] = field(default=_nothing, repr=False)  # shows a PNG file in the trackers


class Callback:
    """Is called at the events of a run, on rank 0. Override the events that you want.

    An `update` is called only at log points, each `log_every` updates, so that no step is delayed. An exception of a callback
    ends the run after it was saved, with exit code 1.
    """

    # `update` is called after every update, before its gradients are cleared, which costs time in each. With compile=step there
    # are no gradients then: its graph clears them.
    every_update = False
    needs_model = False  # events have the model

    def start(self, event: Event) -> None:
        """Training is about to begin, or to continue after a resume."""

    def update(self, event: Event) -> None:
        """An update was made and its record was logged."""

    def evaluation(self, event: Event) -> None:
        """The model was evaluated."""

    def save(self, event: Event) -> None:
        """A checkpoint was saved, or is being saved where saving is asynchronous."""

    def end(self, event: Event) -> None:
        """The run ended, with `event.status`."""
