"""An accelerator that does not exist: tensors on it are torch's fake tensors, and the CPU beside it is real.

`lazy` is a device that autograd runs on without a driver, so forward, backward and update are torch's own. On `cuda` the options
take their CUDA paths (autocast, fused optimizers, pinned memory, side streams); autograd's engine would ask for the device, so
the backward only gives each parameter a gradient. Mixing devices fails on both, as it does on a real device.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

from drivetrain.core import lazy
from drivetrain.core.machine import accelerators
from drivetrain.core.machine.accelerators import Accelerator
from drivetrain.core.machine.device import ON_PURPOSE
from drivetrain.core.step.microbatch import MicroBatch

KINDS = ("lazy", "cuda")
TORCH = str(torch.__path__[0])


class _Fakes(FakeTensorMode):
    avoid_device_init = True  # there is no device to start, whatever torch.cuda.is_available says

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds


class FakeDevice(TorchDispatchMode):
    """Runs operations on the device on fake tensors, and all others for real.

    `waits` are the operations that made the host wait for the device while `watching`, with the line that called them.
    A value that is read from the device is 0 in a step (no overflow), and 1 elsewhere (an evaluation has counted samples).
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.device = torch.device(kind, 0)
        self.fakes = _Fakes(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.in_step, self.watching, self.waits = False, False, set[str]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> FakeDevice:
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=…) makes a CPU tensor, and then copies it
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = arg_tree_leaves(*args, **kwargs)
        target = kwargs.get("device")
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves) and (target is None or target.type != self.device.type):
            return func(*args, **kwargs)
        wait = self._wait(func, args, kwargs, leaves) if self.in_step else None
        line = calling_line(sys._getframe(1)) if wait else None
        if line and self.watching:
            self.waits.add(f"{line}: {wait}")
        if func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::allclose"):
            kind = args[0].dtype if len(args) == 1 else torch.bool
            copied = self.in_step and args[0].device.type == "cpu"
            return torch.tensor(0 if line or copied else 1, dtype=kind).tolist()
        if func._schema.name.startswith(("aten::_foreach", "aten::_fused")) and "copy" not in func._schema.name:
            check_rows(args)
        if func._schema.name in ("aten::_fused_sgd_", "aten::_fused_adagrad_"):
            return None  # updates without a fake form
        for name in ("generator", "pin_memory"):
            if kwargs.get(name):
                kwargs[name] = None
        result = self.fakes.dispatch(func, types, args, kwargs)
        writes_first = func._schema.arguments and (alias := func._schema.arguments[0].alias_info) and alias.is_write
        return args[0] if writes_first and isinstance(args[0], torch.Tensor) else result

    def _wait(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> str | None:
        """The reason why the host waits for a CUDA device here, by torch.cuda.set_sync_debug_mode's rules; None: it does not."""
        name = func._schema.name.removeprefix("aten::")
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
            blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            return f"copies {source.device} to {target}" if blocking and source.device.type != target.type else None
        on_device = any(isinstance(leaf, torch.Tensor) and leaf.device.type == self.device.type for leaf in leaves)
        if not on_device:
            return None
        if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            return name
        if name in ("index", "index_put", "index_put_"):
            indices = [i for i in args[1] if i is not None]
            if any(i.device.type == "cpu" for i in indices):
                return f"{name} by a tensor on the CPU"
            if any(i.dtype in (torch.bool, torch.uint8) for i in indices) and (name == "index" or args[2].numel() > 1):
                return f"{name} by a mask"
        return None


def check_rows(args: Any) -> None:
    """Raise where the lists of a multi-tensor operation mix devices: torch's fake tensors do not look at them all."""
    for row in zip(*(a for a in args if isinstance(a, list | tuple) and a), strict=False):
        devices = {str(t.device) for t in row if isinstance(t, torch.Tensor) and t.ndim}
        if len(devices) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {' and '.join(sorted(devices))}")


WAITS = frozenset((
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "bincount",
    "is_nonzero", "histc", "allclose",
))  # fmt: skip


def calling_line(frame: Any) -> str | None:
    """The innermost line outside of torch; None within a function whose reads are intended."""
    line = None
    while frame is not None:
        code = frame.f_code
        if code in ON_PURPOSE:
            return None
        if line is None and not code.co_filename.startswith((TORCH, __file__, contextlib.__file__)):
            line = f"{code.co_filename.rpartition('/src/')[2]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return line or "torch"


def watch_steps(device: FakeDevice, first: int) -> Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]:
    """A stream watcher: host waits count between a micro-batch and the request for the next, from update number `first` on."""

    def watch(stream: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        updates = 0
        for micro in stream:
            device.in_step, device.watching = True, updates >= first
            try:
                yield micro
            finally:
                device.in_step = device.watching = False
            updates += micro.last

    return watch


# --- what torch asks of a driver ---


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str) -> torch.device:
    """Make torch and drivetrain take `kind` for this machine's accelerator."""
    from drivetrain.precision import base
    from drivetrain.runtime import Runtime

    device = torch.device(kind, 0)
    monkeypatch.setattr(Runtime, "_device", lambda self, world: device)
    monkeypatch.setattr(Runtime, "accelerator", lambda self: Accelerator(kind, 2, (9, 0)))
    monkeypatch.setattr(accelerators, "find", lambda: Accelerator(kind, 2, (9, 0)))
    for module in (torch, lazy.torch):  # the latter has copies of torch's names
        monkeypatch.setattr(module, "Generator", Generator)
        monkeypatch.setattr(module, "autocast", Autocast)
        monkeypatch.setattr(module, "Event", Stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device=None: 2**20)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.utils, "swap_tensors", swap)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: id(self.untyped_storage()) + self.storage_offset())
    if kind == "lazy":
        monkeypatch.setattr(torch, "lazy", MODULE, raising=False)
        return device
    torch._C._ensureCUDADeviceGuardSet()
    for name, value in vars(MODULE).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None)  # torch 2.11 makes a tensor on the device
    for module in (torch.cuda, torch.cuda.graphs):
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(base, "backpropagate", give_gradients)
    return device


def give_gradients(loss: torch.Tensor, weight: torch.Tensor) -> None:
    """In place of the backward: a gradient for every parameter that the loss depends on."""
    if loss.device != weight.device:
        raise RuntimeError(f"the loss is on {loss.device}, its gradient on {weight.device}")
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.add_(1)
        waiting += [following for following, _ in node.next_functions]


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """torch.utils.swap_tensors, by which a module changes its tensors' types, without its check for weak references."""
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


def pretend_ranks(monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int) -> None:
    """Make this process the first of several ranks, whose collectives return at once, with what they were given."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from drivetrain.parallel import process_group

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    join = dist.init_process_group
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(FakeStore(), 0, ranks)]))
    backends = f"cpu:fake,{kind}:fake"
    joined = lambda *_, **__: join(backends, store=FakeStore(), rank=0, world_size=ranks)  # noqa: E731
    monkeypatch.setattr(dist, "init_process_group", joined)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: "fake")
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: dist.group.WORLD)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(dist, "gather_object", lambda value, values, **_: all_gather_object(values, value))
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values, **_: None)
    monkeypatch.setattr(process_group, "device_id", lambda device: None)


class Generator(torch.Generator):
    """A generator of the CPU in place of the device's, where no fake tensor takes numbers from it."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return torch._C.Generator.__new__(cls)

    def __init__(self, device: Any = "cpu") -> None: ...


class Autocast(torch.autocast):
    """Autocast, which does nothing on `lazy`: torch has no casts for it."""

    def __init__(self, device_type: str, *args: Any, **rest: Any) -> None:
        if device_type == "lazy":
            super().__init__("cpu", enabled=False)
        else:
            super().__init__(device_type, *args, **rest)


class Stream:
    """A stream or an event on which nothing is ever waiting."""

    stream_id = device_index = device_type = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def elapsed_time(self, end: Stream) -> float:
        """Milliseconds."""
        return 1.0

    def __getattr__(self, name: str) -> Callable[..., Stream]:
        return lambda *_, **__: Stream()


# As a GPU that Triton does not know: libraries that ask while they are imported would want its driver.
PROPERTIES = SimpleNamespace(uuid="fake", total_memory=2**33, multi_processor_count=100, major=6, minor=0)
MODULE = SimpleNamespace(
    _lazy_init=lambda: None, is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
    get_device_capability=lambda device=None: (9, 0), is_bf16_supported=lambda including_emulation=True: True,
    set_device=lambda device: None, synchronize=lambda device=None: None, mem_get_info=lambda device=None: (8 * 2**30, 8 * 2**30),
    Stream=Stream, Event=Stream, stream=lambda stream: contextlib.nullcontext(), current_stream=lambda device=None: Stream(),
    get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8), set_rng_state=lambda state, device=None: None,
    get_rng_state_all=lambda: [torch.zeros(16, dtype=torch.uint8)], set_rng_state_all=lambda states: None,
    manual_seed_all=lambda seed: None, manual_seed=lambda seed: None, max_memory_allocated=lambda device=None: 2**20,
    memory_reserved=lambda device=None: 2**20, memory_allocated=lambda device=None: 2**20, is_initialized=lambda: True,
    get_device_name=lambda device=None: "fake", get_device_properties=lambda device=None: PROPERTIES,
    profiler=SimpleNamespace(start=lambda: None, stop=lambda: None),
    nvtx=SimpleNamespace(range=lambda name: contextlib.nullcontext()),
    device=lambda index: contextlib.nullcontext(), empty_cache=lambda: None, _is_in_bad_fork=lambda: False,
)  # fmt: skip
