"""What a rank does by itself, where the others do the same: who has more of it is who they all wait for."""

from __future__ import annotations

import time
from typing import Any

from drivetrain.core.lazy import torch


class RankWork:
    """Seconds of the host's clock, in the parts of training's forward in which no rank waits for another.

    The backward, in which they all wait, is not in it, nor are parts inside compiled code, which a clock would cut in pieces.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def through(self, module: torch.nn.Module) -> None:
        """All of a module's forward. Given before what makes ranks meet around it hooks on, it counts none of that."""
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end)

    def between(self, first: torch.nn.Module, last: torch.nn.Module) -> None:
        """From where the forward of `first` begins to where that of `last`, which is inside of it, does."""
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
