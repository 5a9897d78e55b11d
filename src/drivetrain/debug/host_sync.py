"""Host synchronisations hidden in the step: each makes the host wait for the device, and the device then for the host."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any

from drivetrain.core.host_reads import ON_PURPOSE
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.option import CountOrZero, RunSpec
from drivetrain.core.step import StreamWatcher
from drivetrain.debug.base import Debug

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

_COUNTERS = os.path.join("torch", "optim", "optimizer.py")  # reads its step counters, which live on the host on any device


class HostSync(Debug):
    """Name each line within the step that makes the host wait for the device, and count it.

    On CUDA torch tells (torch.cuda.set_sync_debug_mode); on a CPU, which has nothing to wait for, the calls that would wait on
    CUDA are watched. What the loop reads on purpose, at the boundary of an update, does not count.
    """

    def __init__(self, skip: CountOrZero = 1) -> None:
        self.skip = skip
        self.found: Counter[tuple[str, str]] = Counter()  # (place, call) → times
        self._steps = 0

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if run.runtime.device_type() == "cpu" and run.compile.active:
            yield f"debug=host_sync watches calls on a CPU, and {run.named('compile')} makes none: set compile=none"

    def setup(self, context: BuildContext) -> None:
        from drivetrain.debug import torch_modes

        self._context = context
        torch_folder = os.path.dirname(str(torch.__file__)) + os.sep
        self._between = (torch_folder, *map(str, (torch_modes.__file__, __file__, warnings.__file__, contextlib.__file__)))

    def stream_watchers(self) -> list[StreamWatcher]:
        return [self._watched] if self._context.world.rank == 0 else []

    def _watched(self, stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        skipped = 0
        for micro in stream:
            if skipped < self.skip:
                skipped += micro.last
                yield micro
                continue
            self._steps += micro.last
            with self._watching():
                yield micro

    def _watching(self) -> AbstractContextManager[Any]:
        if self._context.device.type == "cuda":
            return self._told_by_cuda()
        from drivetrain.debug.torch_modes import Calls

        return Calls(self._count)

    @contextlib.contextmanager
    def _told_by_cuda(self) -> Iterator[None]:
        shown = warnings.showwarning

        def told(message: Any, *rest: Any, **more: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self._count("waits for the device")
            elif "Synchronization debug mode" not in str(message):  # torch's remark on the mode itself
                shown(message, *rest, **more)

        with warnings.catch_warnings():  # takes `told` back as well
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
            warnings.showwarning = told
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _count(self, call: str) -> None:
        place = self._place(sys._getframe(1))
        if place is not None:
            self.found[place, call] += 1

    def _place(self, frame: FrameType | None) -> str | None:
        """file:line of the innermost frame outside torch; None for a read on purpose."""
        place = None
        while frame is not None:
            code = frame.f_code
            if code in ON_PURPOSE:
                return None
            if code.co_name == "_get_value" and code.co_filename.endswith(_COUNTERS):
                return None
            if place is None and not code.co_filename.startswith(self._between):
                place = f"{_short(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
            frame = frame.f_back
        return place or "a thread of torch's own"

    def report(self) -> list[str]:
        if self._context.world.rank != 0:
            return []
        if not self._steps:
            return [f"debug=host_sync watched no update: the run was over after debug.skip={self.skip}"]
        if not self.found:
            return [f"debug=host_sync: no hidden host synchronisation in {self._steps} updates"]
        head = (
            f"debug=host_sync: {len(self.found)} hidden host synchronisations in {self._steps} updates, the most frequent first"
        )
        return [head, *(f"  {place}: {call}, {n} times" for (place, call), n in self.found.most_common())]


def _short(path: str) -> str:
    """The path from here, where it lies below."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
