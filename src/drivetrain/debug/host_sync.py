"""Finds hidden host synchronisations in the step: each makes the host wait for the device, and then the device for the host."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import ON_PURPOSE
from drivetrain.core.options.option import BuildContext, CountOrZero, RunSpec
from drivetrain.core.step.step import Stream, StreamWatcher
from drivetrain.debug.base import Debug

_OPTIMIZER = os.path.join("torch", "optim", "optimizer.py")  # reads its step counters, on the CPU anyway


class HostSync(Debug):
    """Names and counts the lines in the step that make the host wait for the device.

    On CUDA it uses torch.cuda.set_sync_debug_mode. Other devices have no such mode, and a CPU waits for nothing: there it
    finds the calls that would wait on CUDA. Intended reads of the training loop, at the end of an update, do not count.
    """

    effect = "exact"

    def __init__(self, skip: CountOrZero = 1) -> None:
        self.skip = skip
        self.found: Counter[tuple[str, str]] = Counter()  # (line, call) → times
        self._steps = 0

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if (device := run.runtime.device_type()) != "cuda" and run.compile.active:
            where = "a CPU" if device == "cpu" else device
            yield f"debug=host_sync watches calls on {where}, and {run.named('compile')} makes none: set compile=none"

    def setup(self, context: BuildContext) -> None:
        from drivetrain.debug import torch_modes

        self._context = context
        torch_folder = os.path.dirname(str(torch.__file__)) + os.sep
        self._ignored = (torch_folder, *map(str, (torch_modes.__file__, __file__, warnings.__file__, contextlib.__file__)))

    def stream_watchers(self) -> list[StreamWatcher]:
        return [self._check_steps] if self._context.world.rank == 0 else []

    def _check_steps(self, stream: Stream) -> Stream:
        skipped = 0
        for micro in stream:
            if skipped < self.skip:
                skipped += micro.last
                yield micro
                continue
            self._steps += micro.last
            with self._detection():
                yield micro

    def _detection(self) -> AbstractContextManager[None]:
        if self._context.device.type == "cuda":
            return self._cuda_detection()
        from drivetrain.debug.torch_modes import waiting_calls

        return waiting_calls(self._count)

    @contextlib.contextmanager
    def _cuda_detection(self) -> Iterator[None]:
        showwarning = warnings.showwarning

        def count_or_show(message: Warning | str, *rest: Any, **more: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self._count("waits for the device")
            elif "Synchronization debug mode" not in str(message):  # torch's warning about the mode itself
                showwarning(message, *rest, **more)

        with warnings.catch_warnings():  # also restores showwarning
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
            warnings.showwarning = count_or_show
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _count(self, call: str) -> None:
        line = self._calling_line(sys._getframe(1))
        if line is not None:
            self.found[line, call] += 1

    def _calling_line(self, frame: FrameType | None) -> str | None:
        """Return file:line of the innermost frame outside of torch; None for an intended read."""
        line = None
        while frame is not None:
            code = frame.f_code
            if code in ON_PURPOSE:
                return None
            if code.co_name == "_get_value" and code.co_filename.endswith(_OPTIMIZER):
                return None
            if line is None and not code.co_filename.startswith(self._ignored):
                inside = code.co_filename.startswith(os.getcwd() + os.sep)
                file = os.path.relpath(code.co_filename) if inside else code.co_filename
                line = f"{file}:{frame.f_lineno} in {code.co_name}"
            frame = frame.f_back
        return line or "a thread of torch's own"

    def report(self) -> list[str]:
        if self._context.world.rank != 0:
            return []
        if not self._steps:
            return [f"debug=host_sync watched no update: the run was over after debug.skip={self.skip}"]
        if not self.found:
            return [f"debug=host_sync: no hidden host synchronisation in {self._steps} updates"]
        header = (
            f"debug=host_sync: {len(self.found)} hidden host synchronisations in {self._steps} updates, the most frequent first"
        )
        return [header, *(f"  {line}: {call}, {n} times" for (line, call), n in self.found.most_common())]
