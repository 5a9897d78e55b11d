"""A CUDA device that does not exist, with streams that are simulated: what a loader does on it is checked as it is queued.

Tensors on it are torch's fake tensors, which refuse a mix of devices and every value that is read from the device. The CPU beside
it is real. The streams keep vector clocks, so three mistakes are found that a real device shows only at times:

- a tensor is used on a stream that has not waited for the stream that wrote it;
- memory is given to a new tensor while another stream may still use it;
- the host waits for the device: a copy to the CPU, or one from memory that is not pinned, or one that blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves, tree_leaves

CUDA = torch.device("cuda", 0)
Clock = dict[Any, int]  # stream → how many of its operations are done


class _Fakes(FakeTensorMode):
    avoid_device_init = True  # there is no driver to start


class Event(dict[Any, int]):
    """The operations that were done when it was recorded."""

    def synchronize(self) -> None:
        """Make the host wait for it: here nothing takes time."""


class Stream:
    """A queue of operations: `clock` is what is done by the time that its next operation runs."""

    def __init__(self, *_: Any) -> None:
        self.clock: Clock = {self: 0}

    def __hash__(self) -> int:
        return id(self)

    def record_event(self) -> Event:
        return Event(self.clock)

    def wait_event(self, event: Event) -> None:
        for stream, done in event.items():
            self.clock[stream] = max(done, self.clock.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Memory:
    """One storage: who owns it, and the last operation of each stream that used it."""

    def __init__(self, storage: Any, owner: Stream) -> None:
        self.storage, self.owner = StorageWeakRef(storage), owner
        self.written: Clock = {}
        self.used: Clock = {}


class StreamedDevice(TorchDispatchMode):
    """Runs operations on the device on fake tensors, each on the current stream. `problems` are the mistakes that were made."""

    def __init__(self) -> None:
        super().__init__()
        self.fakes = _Fakes(allow_non_fake_inputs=True)
        self.main = self.current = Stream()
        self.memory: dict[int, Memory] = {}
        self.problems: list[str] = []
        self.copied: list[tuple[torch.Size, torch.dtype]] = []  # from the CPU to the device
        self.strict = True  # else copies may block, as those that are made once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [t for t in arg_tree_leaves(*args, **kwargs) if isinstance(t, torch.Tensor)]
        target = kwargs.get("device")
        if not any(isinstance(t, FakeTensor) for t in given) and (target is None or target.type != "cuda"):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in ("_to_copy", "copy_"):
            self._check_copy(name, args, kwargs)
        if name.startswith("index") and any(t.device.type == "cpu" for t in given[1:]):
            self.problems.append(f"{name} by a tensor on the CPU")
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        with self.fakes:
            result = func(*args, **kwargs)
        self._order(name, func, given, result)
        first = func._schema.arguments[0].alias_info if func._schema.arguments else None
        return args[0] if first is not None and first.is_write and isinstance(args[0], torch.Tensor) else result

    def _check_copy(self, name: str, args: Any, kwargs: Any) -> None:
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
        if source.device.type == target.type:
            return
        if target.type == "cuda":
            self.copied.append((source.shape, source.dtype))
        if not self.strict:
            return
        free = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if target.type == "cpu" or not free or not getattr(source, "pinned", False):
            self.problems.append(f"the host waits for a copy of {tuple(source.shape)} {source.dtype} from {source.device}")

    def _order(self, name: str, func: Any, given: list[torch.Tensor], result: Any) -> None:
        """Queue an operation on the current stream, and check what it reads and writes."""
        stream = self.current
        stream.clock[stream] += 1
        now = stream.clock[stream]
        alive = {id(m): m for m in self.memory.values() if not m.storage.expired()}
        for memory in self.memory.values():  # freed since the last operation, and reused by its owner's next one
            if id(memory) not in alive and memory.owner is stream and not _seen(memory.used, stream):
                self.problems.append(f"{name} may get memory that another stream still uses")
        self.memory = {key: m for key, m in self.memory.items() if id(m) in alive or m.owner is not stream}
        for tensor in (t for t in given if isinstance(t, FakeTensor) and t.device.type == "cuda"):
            memory = self._memory(tensor)
            if not _seen(memory.written, stream):
                self.problems.append(
                    f"{name} reads a tensor of {tuple(tensor.shape)} before the stream that wrote it is waited for"
                )
            memory.used[stream] = now
        for tensor in (t for t in tree_leaves(result) if isinstance(t, FakeTensor) and t.device.type == "cuda"):
            self._memory(tensor).written[stream] = self._memory(tensor).used[stream] = now

    def _memory(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        memory = self.memory.get(storage._cdata)
        if memory is None or memory.storage.expired():
            memory = Memory(storage, self.current)
            self.memory[storage._cdata] = memory
        return memory


def _seen(clock: Clock, stream: Stream) -> bool:
    """True if a stream has waited for these operations."""
    return all(stream.clock.get(other, 0) >= done for other, done in clock.items())


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor if getattr(tensor, "pinned", False) else tensor.clone()
    copied.pinned = True  # type: ignore[attr-defined]
    return copied


@contextlib.contextmanager
def streamed_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamedDevice]:
    """Give torch a CUDA device with simulated streams and pinned memory, as drivetrain sees it."""
    from drivetrain.core.lazy import torch as seen
    from drivetrain.loader import base

    device, empty = StreamedDevice(), torch.empty

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream
        try:
            yield
        finally:
            device.current = before

    module = SimpleNamespace(
        Stream=Stream, stream=on, current_stream=lambda _: device.current, mem_get_info=lambda _: (2**33, 2**33)
    )
    assert seen.float32 is torch.float32  # it is loaded: its attributes are its own now
    monkeypatch.setattr(seen, "get_device_module", lambda _: module)
    monkeypatch.setattr(seen, "Generator", lambda *_: torch.Generator())
    monkeypatch.setattr("drivetrain.loader.auto.synchronize", lambda _: None)
    monkeypatch.setattr(
        seen, "empty", lambda *a, pin_memory=False, **k: _pinned(empty(*a, **k)) if pin_memory else empty(*a, **k)
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", _pinned)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    torch._C._ensureCUDADeviceGuardSet()
    base.side_stream.cache_clear()
    lifts_only = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device) copies from the CPU without starting a driver
    try:
        with device:
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts_only)
        base.side_stream.cache_clear()
