"""Protocols between the config groups, which do not import each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from drivetrain.core.lazy import torch
from drivetrain.core.options.horizon import Progress
from drivetrain.core.options.run_spec import RunSpec
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.step import Made
from drivetrain.core.step.trees import Forward
from drivetrain.core.typed import StateDict


class LossStep(Protocol):
    """The methods that a step calls on a loss."""

    def step(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
        """Run the forward on a micro-batch's inputs, and return its mean loss, 0-d."""


class PrecisionStep(Protocol):
    """The methods that a step calls on a precision."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for forward and loss."""

    def backward(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        """Accumulate the gradients of weight × loss."""

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[], bool | None]) -> Made:
        """Clip and update. False if the update was skipped, for example because `clip` returned False."""


class LogWriter(Protocol):
    """Writes the records of a run: one mapping for each logged update and each evaluation."""

    def log(self, record: Mapping[str, object], /) -> None:
        """Write one record."""

    def log_image(self, name: str, update: int, path: Path, /) -> None:
        """Show a picture, a PNG file."""


class Checkpointed(Protocol):
    """The object that a checkpoint saves: a trainer."""

    model: torch.nn.Module
    progress: Progress

    def state(self) -> StateDict:
        """Return everything except the weights that a resumed run needs. Called on all ranks."""


class Trials(Protocol):
    """The trials that an option may make before the ranks start, each in its own process."""

    @property
    def run(self) -> RunSpec: ...

    @property
    def resumes(self) -> bool: ...  # whether the run continues a checkpoint

    def count_fitting(self, sizes: Sequence[int], most: int, limit_gb: float | None) -> int:
        """Return how many of these ascending micro-batch sizes fit, from the first; a rank's update has `most` samples.

        `limit_gb` limits the device's memory, on a CPU the process's.
        """

    def forecast_micro_batch(self, most: int, limit_gb: float | None) -> int | None:
        """Return the micro-batch, of at most `most` samples, that is forecast to be the largest that fits; 0 if none does.

        None where that is unknown, which is logged.
        """

    def look(self, steps: int, updates: int | None, micro_batches: Sequence[int]) -> dict[str, Any]:
        """Train for `updates` updates of `steps` micro-batches (None: the run's length), then time updates of each micro-batch.

        Returns noise_scale (None: unknown), updates, the samples of the training set, and update_seconds.
        """

    def thread_seconds(self, counts: Sequence[int]) -> list[float]:
        """Return the seconds of a rank's update with each of these numbers of threads; [] where an update is so long that all
        cores are worth it.
        """

    def micro_batch(self) -> int:
        """Return the samples of a rank's forward."""

    def fewest_blocks(self, block: str | None, limit_gb: float) -> dict[str, int]:
        """Return how many of the first `blocks` must be `recomputed` for a rank's step to fit, and the `bytes` of the step.

        `block` is the name of their class. If the step cannot fit, these are its fewest bytes.
        """
