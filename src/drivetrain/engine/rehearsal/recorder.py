"""Records what a step does on fake tensors: each operation with its work, and each storage from its allocation to its end."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from drivetrain.core.torch_patches import fake_addresses
from drivetrain.engine.rehearsal.operation import Operation, describe

OTHER = "activations"  # a storage that is nothing else: what the forward keeps, and temporary results


class _Converter(FakeTensorConverter):
    """Keeps no weak references to fake tensors: with one, torch does not convert or move a module's parameter."""

    def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor) -> None:
        pass


class Fakes(FakeTensorMode):
    """torch's fake tensors, which have shapes and no values. Real tensors that meet them count as fake ones of their shape."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Converter()
        self._standing: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id → the real tensor, which is kept, and its fake
        self._addresses: dict[int, int] = {}  # of the real tensors' memory, by the fakes' storages

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def standing_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor of a real one: always the same, on the same storage as those of its views."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._standing:
            with _disable_current_modes():
                plain = tensor.detach().requires_grad_(False)  # torch has no fakes of views of what was changed in place
            self._standing[id(tensor)] = tensor, self.from_tensor(plain)
            self._addresses[self._standing[id(tensor)][1].untyped_storage()._cdata] = plain.untyped_storage().data_ptr()
        return self._standing[id(tensor)][1]

    @contextmanager
    def as_parameters(self) -> Iterator[None]:
        """Within the context the parameters that modules get are fake. Their memory was reserved, and is never filled."""

        def fake(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> Any:
            if parameter is None or is_lazy(parameter) or isinstance(parameter, FakeTensor):
                return parameter
            with self:
                made = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            return torch.nn.Parameter(made, parameter.requires_grad)

        handle = register_module_parameter_registration_hook(fake)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def with_addresses(self) -> Iterator[None]:
        """Within the context a fake tensor has the address of the memory that it stands for, by which optimizers know views."""

        def data_ptr(tensor: FakeTensor) -> int:
            storage: int = tensor.untyped_storage()._cdata
            return self._addresses.get(storage, storage) + int(tensor.storage_offset()) * tensor.element_size()

        with fake_addresses(data_ptr):
            yield


@dataclass(slots=True)
class Storage:
    """One allocation. `born` and `dead` count allocations and releases; None: it outlives the record."""

    nbytes: int
    born: int
    kind: str = ""
    dead: int | None = None


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Counts bytes and operations while it is entered, above a `Fakes` mode or real tensors.

    It holds no tensor, so that each is freed when the step frees it.
    """

    fakes: Fakes | None = None  # None: real tensors are recorded as they are
    storages: list[Storage] = field(default_factory=list)
    operations: Counter[Operation] = field(default_factory=Counter)
    most_during: dict[str, int] = field(default_factory=dict)  # by signature: the bytes allocated when it has made its results
    times: int = 1  # that an operation counts; memory counts in any case
    phase: str = "forward"  # that the step is in; the backward is told apart by itself
    time: int = 0
    peak_time: int = 0
    now_bytes: int = 0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: OpOverload[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            return _value(args[0])
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self.fakes is not None and name not in MAKES_CONSTANT and not all(isinstance(t, FakeTensor) for t in tensors):
            args, kwargs = tree_map_only(torch.Tensor, self.fakes.standing_for, (args, kwargs))
        out = None if name in NO_FAKE_FORM else func(*args, **kwargs)
        is_number = isinstance(out, torch.Tensor) and out.dim() == 0 and out.device.type == "cpu"
        if self.fakes is not None and name in FILLS and is_number:
            out = _constant(func, args, kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf)
        if self.times and (operation := describe(func, args, kwargs, out, self.phase)) is not None:
            self.operations[operation] += self.times
            self.most_during[operation.signature] = max(self.now_bytes, self.most_during.get(operation.signature, 0))
        return out

    def note(self, tensor: torch.Tensor, kind: str = "") -> None:
        """Count the tensor's storage, if it is a new one. A `kind` names it for the split of the peak."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._living:
            if kind:
                self._living[key][0].kind = kind
            return
        made = Storage(storage.nbytes(), self.time, kind)
        self.storages.append(made)
        self._living[key] = made, weakref.ref(storage, lambda _, key=key: self._freed(key))  # type: ignore[misc]
        self._add(made.nbytes)

    def _freed(self, key: int) -> None:
        storage, _ = self._living.pop(key)
        storage.dead = self.time
        self._add(-storage.nbytes)

    def _add(self, nbytes: int) -> None:
        self.time += 1
        self.now_bytes += nbytes
        if self.now_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_time = self.now_bytes, self.time

    def at_peak(self) -> Counter[str]:
        """The bytes of each kind when most were allocated."""
        found: Counter[str] = Counter()
        for s in self.storages:
            if s.born < self.peak_time and (s.dead is None or s.dead >= self.peak_time):
                found[s.kind or OTHER] += s.nbytes
        return found


MAKES_CONSTANT = ("aten::lift_fresh", "aten::lift_fresh_copy")  # torch.tensor(1.0): the fake that it makes keeps its value
FILLS = ("aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor")  # make a tensor of a number
NO_FAKE_FORM = ("aten::_fused_sgd_", "aten::_fused_adagrad_")  # updates in place, which fake tensors need not make


def _constant(func: OpOverload[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> torch.Tensor:
    """The fake of a single number, which keeps its value as that of torch.tensor(1.0) does."""
    with _disable_current_modes():
        real = func(*args, **kwargs)
    made: torch.Tensor = torch.ops.aten.lift_fresh.default(real)
    return made


def _value(tensor: torch.Tensor) -> object:
    """The value of a tensor that the host reads, where it is known, as an optimizer's count of updates is.

    Every other fake tensor reads as 0, as of an overflow that did not happen.
    """
    if isinstance(tensor, FakeTensor):
        if tensor.constant is not None:  # made of numbers alone: torch keeps its value beside
            with _disable_current_modes():
                return tensor.constant.item()
        return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0
    with _disable_current_modes():
        return tensor.tolist()
