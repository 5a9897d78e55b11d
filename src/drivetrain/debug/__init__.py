"""Debugging aids: off in training, one switch when wanted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from drivetrain.lazy import torch
from drivetrain.spec import Count, Part, Run


class Debug(Part):
    """debug=none: nothing is installed."""

    updates: int | None = None  # the run stops after so many
    eval_batches: int | None = None

    def start(self) -> None:
        """Install what the option needs, before anything is built."""

    def examine(self, model: torch.nn.Module, loss: Any, data: Any) -> list[str]:
        """Look at the model before it is trained, patched or wrapped; `data` is the training pipeline: (x, y) for a request."""
        return []

    def attach(self, trainer: Any) -> None:
        """Wrap parts of the finished trainer."""

    def stop(self) -> list[str]:
        """Take it away again, for the process may train another run, and say what was found."""
        return []


class Fast(Debug):
    """A few updates and evaluation batches: does the whole path run?"""

    def __init__(self, updates: Count = 5, eval_batches: Count = 2) -> None:
        self.updates, self.eval_batches = updates, eval_batches


class Anomaly(Debug):
    """torch's anomaly detection: a NaN in the backward stops the run and names the forward line that made it. Slow."""

    def __init__(self, check_nan: bool = True) -> None:
        self.check_nan = check_nan

    def advise(self, run: Run) -> Iterator[str]:
        if self.check_nan and run.choices["precision"] == "amp":
            yield (
                "debug=anomaly stops at the NaN of an overflow that precision=amp would skip: "
                "set precision=bf16, or debug.check_nan=false to see forward lines only"
            )

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it is slow; whoever asked for it knows
            torch.autograd.set_detect_anomaly(True, check_nan=self.check_nan)

    def stop(self) -> list[str]:
        torch.autograd.set_detect_anomaly(False)
        return []
