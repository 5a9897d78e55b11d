"""The lines of the user's own code that a step runs through: their time, their operations, what they read and make."""

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

from drivetrain.core import process
from drivetrain.debug.torch_modes import Calls

SAMPLE_S = 0.001
WATCHED = 3  # updates whose every operation is looked at
_FACTORIES = ("randperm", "rand", "randn", "randint", "arange", "zeros", "ones", "full", "empty", "eye", "linspace", "tensor")


@dataclass
class Line:
    """A line of the user's own code, for each update."""

    place: str  # file:line in function
    of_data: bool = False  # it reads samples
    share: float = 0.0  # of the step's time, by samples
    operations: int = 0
    small: int = 0  # of them, those on a sixteenth of the input's elements or less
    reads: int = 0  # of values on the host: .item(), float(), bool()
    made: dict[str, float] = field(default_factory=dict)  # factory → ms, of tensors made on the CPU


class Stream:
    """The training stream, which knows whether it is being read: what runs then is the data's, not the step's."""

    def __init__(self, stream: Iterator[Any]) -> None:
        self._stream, self.reading = stream, False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        self.reading = True
        try:
            return next(self._stream)
        finally:
            self.reading = False


def update(trainer: Any, stream: Iterable[Any]) -> None:
    """One update, as the loop makes it."""
    for micro in stream:
        trainer.micro(micro)
        if micro.last:
            break
    trainer.update()
    trainer.ema.update()
    trainer.zero_grad()


def one(stream: Stream) -> tuple[Any, int]:
    """A micro-batch, and how many of them make an update."""
    count = 1
    for micro in stream:
        if micro.last:
            return micro, count
        count += 1
    raise RuntimeError("the data ended")


def lines(trainer: Any, stream: Stream, look_s: float) -> tuple[list[Line], int]:
    """The user's own lines that a step runs through: by samples of the stack, then by every operation of a few updates.

    And how many operations there are in an update.
    """
    found: dict[str, Line] = {}
    samples, of_data, total = _sampled(trainer, stream, look_s)
    for place, count in samples.items():
        found[place] = Line(place, place in of_data, count / total)
    micro, _ = one(stream)
    with _Operations(stream, micro.x.numel() // 16) as operations:
        for _ in range(WATCHED):
            update(trainer, stream)
    for place, line in operations.lines.items():
        kept = found.setdefault(place, Line(place))
        kept.operations, kept.small = line.operations // WATCHED, line.small // WATCHED
        kept.made = {name: 1e3 * seconds / WATCHED for name, seconds in line.made.items()}
    for place, count in _reads(trainer, stream).items():
        found.setdefault(place, Line(place)).reads = -(-count // WATCHED)
    return sorted(found.values(), key=lambda line: (-line.share, -line.operations)), operations.total // WATCHED


def _sampled(trainer: Any, stream: Stream, look_s: float) -> tuple[Counter[str], set[str], int]:
    """How often each own line was the innermost one of this thread's stack, which of them read data, and out of how many."""
    counts: Counter[str] = Counter()
    reading: Counter[str] = Counter()
    total, over, me = 0, threading.Event(), threading.get_ident()

    def sample() -> None:
        nonlocal total
        while not over.wait(SAMPLE_S):
            total += 1
            place = own_place(sys._current_frames().get(me))
            if place is not None:
                counts[place] += 1
                reading.update([place] if stream.reading else ())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    began = time.perf_counter()
    while time.perf_counter() - began < look_s:
        update(trainer, stream)
    over.set()
    thread.join()
    return counts, {place for place, n in reading.items() if 2 * n > counts[place]}, max(1, total)


class _Operations(TorchDispatchMode):
    """Every operation by the own line that it came from."""

    def __init__(self, stream: Stream, small: int) -> None:
        super().__init__()
        self.stream = stream
        self.lines: dict[str, Line] = {}
        self.small, self.total = small, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        if self.stream.reading:
            return out
        place = own_place(sys._getframe(1))
        self.total += 1
        if place is not None:
            line = self.lines.setdefault(place, Line(place))
            name = func.overloadpacket.__name__
            line.operations += 1
            line.small += isinstance(out, torch.Tensor) and out.numel() <= self.small
            if name in _FACTORIES and isinstance(out, torch.Tensor) and out.device.type == "cpu":
                line.made[name] = line.made.get(name, 0.0) + seconds
        return out


def _reads(trainer: Any, stream: Stream) -> Counter[str]:
    """How often each own line made the host wait for the device, or would on CUDA."""
    found: Counter[str] = Counter()

    def told(_: str) -> None:
        place = own_place(sys._getframe(1))
        if place is not None and not stream.reading:
            found[place] += 1

    with Calls(told):
        for _ in range(WATCHED):
            update(trainer, stream)
    return found


_NOT_OWN = tuple(
    str(Path(place)) + os.sep
    for place in (
        Path(torch.__file__).parent, process.PACKAGE, sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"],
    )
)  # fmt: skip


def own_place(frame: FrameType | None) -> str | None:
    """file:line of the innermost frame of code that is neither Python's, torch's, a package's nor ours; None if none is."""
    while frame is not None:
        name = frame.f_code.co_filename
        if frame.f_code.co_name != "<module>" and os.sep in name and not name.startswith(("<", *_NOT_OWN)):
            shown = os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name
            return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None
