"""Measures how long each rank works without waiting for others, to find the slowest one."""

from __future__ import annotations

import time
from typing import Any

from drivetrain.core.lazy import torch


class RankWork:
    """Adds up the host's time in those parts of the training forward in which no rank waits for another.

    It leaves out the backward, in which all ranks wait, and compiled code, where a clock would cause graph breaks.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def time_forward(self, module: torch.nn.Module) -> None:
        """Time a module's whole forward. Call it before FSDP or DDP add their hooks, so that these are not timed."""
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end)

    def time_between(self, first: torch.nn.Module, last: torch.nn.Module) -> None:
        """Time from the start of `first`'s forward to the start of `last`'s, which is inside of it."""
        first.register_forward_pre_hook(self._begin)
        last.register_forward_pre_hook(self._end)

    def _begin(self, module: Any, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._since = time.perf_counter()

    def _end(self, module: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._since is not None and module.training:
            self.seconds += time.perf_counter() - self._since
        self._since = None
