"""One operation of a step: what it is, on which shapes, and how much it computes and moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Kind = Literal["view", "product", "convolution", "attention", "pointwise", "update"]
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
_CONVOLUTION = ("convolution", "_convolution", "convolution_backward")


class Spec(NamedTuple):
    """A tensor's shape, without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, each once."""
        elements = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            elements *= size if stride else 1  # an expanded dimension is read once
        return elements * self.dtype.itemsize


@dataclass(frozen=True)
class Operation:
    """An operation of a step. Two with the same signature do the same work."""

    signature: str
    kind: Kind = field(compare=False)
    phase: str  # forward, backward or update
    flops: int = field(compare=False)
    nbytes: int = field(compare=False)  # read and written
    result_bytes: int = field(compare=False)  # newly allocated
    dtype: torch.dtype = field(compare=False)  # of what it computes with
    call: tuple[OpOverload[..., object], tuple[object, ...], Mapping[str, object]] = field(
        compare=False, repr=False
    )  # the function, and its arguments with specs in place of tensors


def describe(
    func: OpOverload[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], out: object, phase: str = "forward"
) -> Operation | None:
    """Describe a call by what it got and returned; None where nothing is to be done, such as a question for a tensor's device."""
    if func.namespace in ("prim", "profiler"):
        return None
    specs = tree_map(spec_of, (args, kwargs))
    inputs = [leaf for leaf in tree_leaves(specs, is_leaf=is_spec) if is_spec(leaf)]
    results = [leaf for leaf in tree_leaves(tree_map(spec_of, out), is_leaf=is_spec) if is_spec(leaf)]
    kind = _kind(func)
    flops = _flops(func, args, kwargs, out)
    nbytes = made = 0
    if kind != "view":
        written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        in_place = sum(s.nbytes for a, w in zip(args, written, strict=False) if w for s in _specs(a))
        fresh = any(r.alias_info is None for r in func._schema.returns)
        made = sum(s.nbytes for s in results) if fresh else 0
        nbytes = sum(s.nbytes for s in inputs) + made + in_place
        if in_place and func._overloadpacket.__name__ in ("zero_", "fill_", "copy_", "bernoulli_"):
            nbytes -= sum(s.nbytes for s in _specs(args[0]))  # written, and not read
    if torch._C._current_graph_task_id() != -1:  # autograd's engine makes the call
        phase = "backward"
    dtype = inputs[0].dtype if inputs else results[0].dtype if results else torch.float32
    signature = f"{func} {specs[0]!r} {specs[1]!r}"  # the same for the same work, in every process
    return Operation(signature, kind, phase, flops, nbytes, made, dtype, (func, *specs))


def spec_of(value: object) -> object:
    """A tensor's spec; any other value as it is."""
    return Spec(tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, torch.Tensor) else value


def is_spec(value: object) -> bool:
    """True if it stands for a tensor."""
    return isinstance(value, Spec)


def _specs(tree: object) -> list[Spec]:
    return [leaf for leaf in tree_leaves(tree_map(spec_of, tree), is_leaf=is_spec) if is_spec(leaf)]


def _kind(func: OpOverload[..., object]) -> Kind:
    name = func._overloadpacket.__name__
    returns = func._schema.returns
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return "view"
    if name.startswith(_ATTENTION):
        return "attention"
    if name in _CONVOLUTION:
        return "convolution"
    if name.startswith(("_foreach", "_fused_ad", "_fused_sgd", "_amp_foreach")):
        return "update"
    return "product" if func._overloadpacket in flop_registry else "pointwise"


def _flops(func: OpOverload[..., object], args: tuple[Any, ...], kwargs: Mapping[str, object], out: object) -> int:
    """torch's formulas, those of FlopCounterMode; a CPU's attention, for which it has none, counts as a GPU's."""
    name = func._overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return int(sdpa_flop_count(*(tuple(t.shape) for t in args[:3])))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return int(sdpa_backward_flop_count(*(tuple(t.shape) for t in args[:4])))
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
