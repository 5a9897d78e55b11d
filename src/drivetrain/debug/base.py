"""Debugging aids: off in training, one switch when wanted."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, Option, RunSpec


class Debug(Option):
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
        self._found: list[str] = []
        self._show = warnings.showwarning

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.check_nan and run.choices["precision"] == "amp":
            yield (
                f"{run.named('debug')} stops at the first NaN, and {run.named('precision')} makes some on purpose, to find its "
                "scale, and skips them: set precision=bf16 or fp32, or debug.check_nan=false to see forward lines only"
            )

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it is slow; whoever asked for it knows
            torch.autograd.set_detect_anomaly(True, check_nan=self.check_nan)
        self._show = warnings.showwarning
        warnings.showwarning = self._warned

    def _warned(self, message: Warning | str, *rest: Any, **more: Any) -> None:
        """Keep what torch tells of the forward; it does so by a warning, which no file of the run would have."""
        if str(message).startswith("Error detected in"):
            self._found += str(message).strip().splitlines()
            if os.environ.get("RANK", "0") == "0":  # others are not asked what they found
                return
        self._show(message, *rest, **more)

    def stop(self) -> list[str]:
        torch.autograd.set_detect_anomaly(False)
        warnings.showwarning = self._show
        found, self._found = self._found, []
        return [*found, *(f"debug=anomaly: {line}" for line in _last_place(found))]


def _last_place(traceback: list[str]) -> list[str]:
    """Of a forward's traceback the last place outside of torch, in one line."""
    places = [n for n, line in enumerate(traceback) if line.startswith('  File "') and f"{os.sep}torch{os.sep}" not in line]
    return [f"made in {traceback[n].strip()}: {traceback[n + 1].strip()}" for n in places[-1:] if n + 1 < len(traceback)]
