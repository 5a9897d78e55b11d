"""Counts the floating-point operations of a model's training, without computing anything."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from drivetrain.saving import checkpoint_io


class ModelFlops(NamedTuple):
    """The operations that one sample takes in forward and backward; None where they cannot be counted, with the reason."""

    per_sample: float | None
    reason: str = ""


def count(model: torch.nn.Module, example: torch.Tensor) -> ModelFlops:
    """Count on tensors that have shapes and no values. The model and the random numbers stay as they are.

    Call it before activation checkpointing and sharding: what is computed a second time is not the model's work.
    """
    random = checkpoint_io.random_state()
    try:
        total = _count(model, example)
    except Exception as error:  # a forward that reads values, or an operation that torch has no shapes for
        lines = str(error).strip().splitlines() or [""]
        return ModelFlops(None, f"the model's operations cannot be counted: {type(error).__name__}: {lines[0]}")
    finally:
        checkpoint_io.restore_random_state([random])
    return ModelFlops(total / len(example)) if total else ModelFlops(None, "torch counts no operations of this model")


def _count(model: torch.nn.Module, example: torch.Tensor) -> int:
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        weights[name] = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    x = torch.empty_like(example, device="meta")
    # Attention as two matrix products: torch has no formula for a CPU's fused kernel.
    with _Counter() as counter, torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        outputs = pytree.tree_leaves(torch.func.functional_call(model, weights, (x,)))
        sums = [t.sum() for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
        if sums:
            torch.autograd.backward(sums)
    total: int = counter.total
    return total


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up torch's formulas, those of FlopCounterMode, and remembers operations that it has seen.

    torch runs many operations without values step by step in Python, for a millisecond each. A model repeats its blocks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._seen: dict[Any, tuple[int, Any]] = {}  # operation and shapes → its count, its outputs' shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable or any(r.alias_info is not None for r in schema.returns):  # the output is an input
            out = func(*args, **kwargs)
            self.total += _flops(func, args, kwargs, out)
            return out
        key = (func, _described(args), _described(kwargs.items()))
        if key not in self._seen:
            out = func(*args, **kwargs)
            self._seen[key] = _flops(func, args, kwargs, out), pytree.tree_map_only(torch.Tensor, _Shape.of, out)
        flops, shapes = self._seen[key]
        self.total += flops
        return pytree.tree_map_only(_Shape, _Shape.tensor, shapes)


class _Shape:
    """The shape of a tensor."""

    def __init__(self, *of: Any) -> None:
        self._of = of

    @classmethod
    def of(cls, t: torch.Tensor) -> _Shape:
        return cls(t.shape, t.stride(), t.dtype, t.device)

    def tensor(self) -> torch.Tensor:
        shape, stride, dtype, device = self._of
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _described(value: Any) -> Any:
    """What an operation's outputs depend on, as a key."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list) or type(value).__name__ == "dict_items":
        return tuple(map(_described, value))
    return type(value), value
