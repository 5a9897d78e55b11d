"""Torch modes that observe every call to torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Tensor methods that read values into Python. They dispatch no operation, or one of another name.
READS = frozenset((
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__array__",
    "__repr__", "__format__", "__contains__",
))  # fmt: skip
# Operations that depend on the data for the shape of their result or for a Python value.
WAITS = frozenset((
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "bincount",
))  # fmt: skip
MASKS = (torch.bool, torch.uint8)


@contextmanager
def waiting_calls(found: Callable[[str], None]) -> Iterator[None]:
    """Within the context `found` is called with the name of each call that would wait for the device."""
    operations = _Operations(found)
    with operations, _Reads(found, operations):
        yield


class _Operations(TorchDispatchMode):
    """Observes dispatched operations, including those within torch's own functions and the backward."""

    def __init__(self, found: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.named = found, False  # named: the Python call has been reported already

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = func._schema.name.removeprefix("aten::")
        if not self.named:
            if name in WAITS:
                self.found(name)
            elif name.startswith("index") and _indexes_by_mask(name, args):
                self.found(f"{name} by a mask")
            elif name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
                self.found(name)
        return func(*args, **(kwargs or {}))


def _indexes_by_mask(name: str, args: tuple[object, ...]) -> bool:
    """Return whether a mask selects elements, so that the host needs their number. Filling with one value does not."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    indices, values = args[1], args[2] if len(args) > 2 else None
    masked = isinstance(indices, list | tuple) and any(isinstance(i, torch.Tensor) and i.dtype in MASKS for i in indices)
    return masked and (not isinstance(values, torch.Tensor) or values.numel() > 1)


class _Reads(TorchFunctionMode):
    """Observes the methods that Python calls on tensors."""

    def __init__(self, found: Callable[[str], None], operations: _Operations) -> None:
        super().__init__()
        self.found, self.operations = found, operations

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.backward:
            with self:  # torch leaves the mode during a call, but backward calls further Python code
                _backward(*args, **(kwargs or {}))  # type: ignore[arg-type]
                return None
        if getattr(func, "__name__", "") not in READS:
            return func(*args, **(kwargs or {}))
        self.found(f"Tensor.{func.__name__}")
        self.operations.named = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.operations.named = False


def _backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[torch.Tensor] | None = None,
) -> None:
    """Run Tensor.backward without entering the mode again."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


class NarrowFloats(TorchDispatchMode):
    """Calls `found` at each operation that returns floats narrower than float64."""

    def __init__(self, found: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                self.found()
        return result
