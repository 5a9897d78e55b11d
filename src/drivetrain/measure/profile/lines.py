"""Profiles the user's own lines within a step: their time, their operations, what they read back and what they create."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.core import process, trees
from drivetrain.debug.torch_modes import WaitingCalls

SAMPLE_S = 0.001  # between two samples of the stack
UPDATES = 3  # in which every operation is recorded
_FACTORIES = ("randperm", "rand", "randn", "randint", "arange", "zeros", "ones", "full", "empty", "eye", "linspace", "tensor")


@dataclass
class Line:
    """A line of the user's own code; counts and times are those of one update."""

    place: str  # file:line in function
    reads_data: bool = False  # it runs while the step waits for the loader
    share: float = 0.0  # of the step's time, by stack samples
    operations: int = 0
    small_operations: int = 0  # on a sixteenth of the input's elements or less
    host_reads: int = 0  # values read back to the host: .item(), float(), bool()
    created_ms: dict[str, float] = field(default_factory=dict)  # by factory function, of tensors created on the CPU


class TrackedStream:
    """The training stream; `reading` says whether it is being read, so that what runs then counts as the data's."""

    def __init__(self, stream: Iterator[Any]) -> None:
        self._stream, self.reading = stream, False

    def __iter__(self) -> TrackedStream:
        return self

    def __next__(self) -> Any:
        self.reading = True
        try:
            return next(self._stream)
        finally:
            self.reading = False


def update(trainer: Any, stream: Iterable[Any]) -> None:
    """Run one update, as the training loop does."""
    loss_sum = torch.zeros((), device=trainer.device)
    for micro in stream:
        trainer.step.micro_batch(micro, loss_sum)
        if micro.last:
            break
    trainer.step.update()
    trainer.ema.update()
    trainer.step.zero_grad()


def read_update(stream: TrackedStream) -> tuple[Any, int]:
    """Read the micro-batches of one update; return the last one and how many there are."""
    for count, micro in enumerate(stream, 1):
        if micro.last:
            return micro, count
    raise RuntimeError("the data ended")


def profile_lines(trainer: Any, stream: TrackedStream, profile_s: float) -> tuple[list[Line], int]:
    """Profile the user's own lines by stack samples for `profile_s` seconds, then by every operation of a few updates.

    Returns the lines, the most expensive first, and the number of operations in an update.
    """
    found: dict[str, Line] = {}
    samples, data_lines, total = _sample_stack(trainer, stream, profile_s)
    for place, count in samples.items():
        found[place] = Line(place, place in data_lines, count / total)
    micro, _ = read_update(stream)
    with _OperationCounter(stream, sum(t.numel() for t in trees.leaves(micro.x)) // 16) as counter:
        for _ in range(UPDATES):
            update(trainer, stream)
    for place, counted in counter.lines.items():
        line = found.setdefault(place, Line(place))
        line.operations = counted.operations // UPDATES
        line.small_operations = counted.small_operations // UPDATES
        line.created_ms = {name: ms / UPDATES for name, ms in counted.created_ms.items()}
    for place, count in _host_reads(trainer, stream).items():
        found.setdefault(place, Line(place)).host_reads = -(-count // UPDATES)
    return sorted(found.values(), key=lambda line: (-line.share, -line.operations)), counter.total // UPDATES


def _sample_stack(trainer: Any, stream: TrackedStream, profile_s: float) -> tuple[Counter[str], set[str], int]:
    """Sample this thread's stack during updates.

    Returns how often each user line was the innermost one, the lines that mostly read data, and the number of samples.
    """
    counts: Counter[str] = Counter()
    reading: Counter[str] = Counter()
    total, done, thread_id = 0, threading.Event(), threading.get_ident()

    def sample() -> None:
        nonlocal total
        while not done.wait(SAMPLE_S):
            total += 1
            place = user_line(sys._current_frames().get(thread_id))
            if place is not None:
                counts[place] += 1
                reading.update([place] if stream.reading else ())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    began = time.perf_counter()
    while time.perf_counter() - began < profile_s:
        update(trainer, stream)
    done.set()
    sampler.join()
    return counts, {place for place, n in reading.items() if 2 * n > counts[place]}, max(1, total)


class _OperationCounter(TorchDispatchMode):
    """Counts every operation outside of data reading, by the user line that it came from."""

    def __init__(self, stream: TrackedStream, small: int) -> None:
        super().__init__()
        self.stream, self.small = stream, small
        self.lines: dict[str, Line] = {}
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        ms = 1e3 * (time.perf_counter() - began)
        if self.stream.reading:
            return out
        self.total += 1
        place = user_line(sys._getframe(1))
        if place is not None:
            line = self.lines.setdefault(place, Line(place))
            name = func.overloadpacket.__name__
            line.operations += 1
            line.small_operations += isinstance(out, torch.Tensor) and out.numel() <= self.small
            if name in _FACTORIES and isinstance(out, torch.Tensor) and out.device.type == "cpu":
                line.created_ms[name] = line.created_ms.get(name, 0.0) + ms
        return out


def _host_reads(trainer: Any, stream: TrackedStream) -> Counter[str]:
    """How often each user line makes the host wait for the device, or would on CUDA."""
    found: Counter[str] = Counter()

    def count(_: str) -> None:
        place = user_line(sys._getframe(1))
        if place is not None and not stream.reading:
            found[place] += 1

    with WaitingCalls(count):
        for _ in range(UPDATES):
            update(trainer, stream)
    return found


_LIBRARIES = tuple(
    str(Path(place)) + os.sep
    for place in (
        Path(torch.__file__).parent,
        process.PACKAGE,
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
    )
)


def user_line(frame: FrameType | None) -> str | None:
    """file:line of the innermost frame that is not in Python's library, torch, an installed package or drivetrain."""
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_code.co_name != "<module>" and os.sep in name and not name.startswith(("<", *_LIBRARIES)):
            shown = os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name
            return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None
