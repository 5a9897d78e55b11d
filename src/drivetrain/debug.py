"""Debugging aids: off in training, one switch when wanted."""

from __future__ import annotations

import warnings

from drivetrain.lazy import torch
from drivetrain.spec import Count, Part


class Debug(Part):
    """debug=none: nothing is installed."""

    updates: int | None = None  # the run stops after so many
    eval_batches: int | None = None

    def start(self) -> None:
        """Install what the option needs, before the first step."""

    def stop(self) -> None:
        """Take it away again: the process may train another run."""


class Fast(Debug):
    """A few updates and evaluation batches: does the whole path run?"""

    def __init__(self, updates: Count = 5, eval_batches: Count = 2) -> None:
        self.updates, self.eval_batches = updates, eval_batches


class Anomaly(Debug):
    """torch's anomaly detection: a NaN in the backward stops the run and names the forward line that made it. Slow."""

    def __init__(self, check_nan: bool = True) -> None:
        self.check_nan = check_nan

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it is slow; whoever asked for it knows
            torch.autograd.set_detect_anomaly(True, check_nan=self.check_nan)

    def stop(self) -> None:
        torch.autograd.set_detect_anomaly(False)
