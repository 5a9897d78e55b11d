"""Drops a block's activations and recomputes them in the backward, without other effects.

A second forward would update BatchNorm's running statistics twice, and draw other random numbers. torch's checkpoint restores the
random state, but a graph that also records the backward (compile=step) cannot. There the drawn values themselves are kept, and so
are the values chosen by a policy. (torch's own selective contexts leave the choice to a compiler that splits the backward from
the forward; this graph has none.)
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from drivetrain.core.machine import torch_patches
from drivetrain.core.machine.torch_patches import wrap_forward
from drivetrain.core.step.trees import Tree

Policy = Callable[..., CheckpointPolicy]  # (context, operation, *arguments) → keep or recompute
Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]  # around forward and recomputation
Values = dict[OpOverload, list[Tree]]  # operation → the result of each of its calls, None for a result to recompute
Arguments = tuple[Any, ...]  # arguments of an operation: tensors, numbers and lists of them

_aten = torch.ops.aten
_ATTENTION = tuple(
    getattr(_aten, name)
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(_aten, name)
)
# The position of a product's first factor among the arguments.
_FACTORS: dict[object, int] = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1, _aten._scaled_mm: 0}
_CONVOLUTIONS = (_aten.convolution, _aten._convolution)
torch_patches.ignore_profiler_ranges()


def checkpoint_forward(block: torch.nn.Module, policy: Callable[[], Policy] | None = None) -> Callable[[], None]:
    """Wrap the block's forward in a (non-reentrant) checkpoint, and return the function that undoes it.

    `policy` returns the policy of kept results.
    """
    norms = [m for m in block.modules() if isinstance(m, _NormBase)]
    if policy is not None:
        _disable_inplace(block)

    def selective_contexts() -> Contexts:
        if policy is None:
            return nullcontext(), nullcontext()
        contexts: Contexts = create_selective_checkpoint_contexts(policy())
        return contexts

    def contexts() -> Contexts:
        forward_context, recompute_context = selective_contexts()
        return forward_context, _both(_frozen_statistics(norms), recompute_context)

    def traced_contexts() -> Contexts:
        values: Values = {}
        return _Record(values, policy and policy()), _Replay(values, norms)

    def wrapped(forward: Callable[..., Tree]) -> Callable[..., Tree]:
        @functools.wraps(forward)
        def recomputed(*args: Tree, **kwargs: Tree) -> Tree:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            compiled = torch.compiler.is_dynamo_compiling()  # a compiled graph already writes its buffers once
            if policy is None and (compiled or not (norms or _is_traced())):
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            around = selective_contexts if compiled else traced_contexts if _is_traced() else contexts
            return checkpoint(forward, *args, use_reentrant=False, context_fn=around, **kwargs)

        return recomputed

    return torch_patches.wrap_forward(block, wrapped)


def products(min_depth: int) -> Policy:
    """Policy: keep matrix products, convolutions and attention; recompute the rest, including sums over few terms."""

    def policy(_: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return _keep_if(_is_product(operation, args, min_depth) and not _draws(operation, args, kwargs))

    return policy


def half(min_depth: int) -> Policy:
    """Policy: keep every second result of `products`."""
    seen: Counter[bool] = Counter()  # older torch also calls the policy in the recomputation, which is counted separately

    def policy(context: SelectiveCheckpointContext, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        if not _is_product(operation, args, min_depth) or _draws(operation, args, kwargs):
            return _keep_if(False)
        seen[context.is_recompute] += 1
        return _keep_if(seen[context.is_recompute] % 2 == 1)

    return policy


def attention(_: int) -> Policy:
    """Policy: keep only attention, whose cost grows with the square of the length."""

    def policy(_: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return _keep_if(_packet(operation) in _ATTENTION and not _draws(operation, args, kwargs))

    return policy


def _keep_if(keep: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _packet(operation: object) -> object:
    return operation.overloadpacket if isinstance(operation, OpOverload) else operation


def _is_product(operation: object, args: Arguments, min_depth: int) -> bool:
    packet = _packet(operation)
    if packet in _FACTORS:
        return int(args[_FACTORS[packet]].shape[-1]) >= min_depth
    if packet in _CONVOLUTIONS:
        weight, transposed, groups = args[1], args[6], args[8]
        per_output = (weight.shape[0] // groups if transposed else weight.shape[1]) * math.prod(weight.shape[2:])
        return int(per_output) >= min_depth
    return packet in _ATTENTION


def _draws(operation: object, args: Arguments, kwargs: Mapping[str, object]) -> bool:
    """Return whether this call draws random numbers. Skipping it in the recomputation would shift later draws."""
    if not isinstance(operation, OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    names = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    return kwargs.get("dropout_p", args[position] if position < len(args) else 0.0) != 0.0


def _disable_inplace(block: torch.nn.Module) -> None:
    """Turn off in-place activations, which would overwrite a kept result."""
    for module in block.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]


def _is_traced() -> bool:
    """Return whether the backward is being recorded into the same graph as the forward."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


class _Record(TorchDispatchMode):
    """Keeps the forward's random draws, and the results of operations chosen by the policy."""

    def __init__(self, values: Values, policy: Policy | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values, self.policy = values, policy

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: dict[str, Tree] | None = None
    ) -> Tree:
        out = func(*args, **(kwargs or {}))
        self.values.setdefault(func, []).append(self._kept(func, args, kwargs or {}, out))
        return out

    def _kept(self, func: OpOverload, args: Arguments, kwargs: dict[str, Tree], out: Tree) -> Tree:
        if _draws(func, args, kwargs):  # a copy, because dropout scales its mask in place
            return tree_map_only(torch.Tensor, torch.Tensor.clone, out)
        context = SelectiveCheckpointContext(is_recompute=False)
        if self.policy is None or self.policy(context, func, *args, **kwargs) is not CheckpointPolicy.MUST_SAVE:
            return None
        # Nothing writes into it later: before any recording an update runs eagerly, and torch's contexts refuse such a forward.
        return tree_map_only(torch.Tensor, torch.Tensor.detach, out)


class _Replay(TorchDispatchMode):
    """Returns the kept values call by call, and freezes BatchNorm's statistics."""

    def __init__(self, values: Values, norms: list[_NormBase]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values, self.frozen = values, _frozen_statistics(norms)

    def __enter__(self) -> Self:
        self.remaining = {func: iter(kept) for func, kept in self.values.items()}
        self.frozen.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.frozen.__exit__(*error)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Arguments = (), kwargs: dict[str, Tree] | None = None
    ) -> Tree:
        kept = next(self.remaining.get(func, iter(())), None)
        if kept is None:
            return func(*args, **(kwargs or {}))
        return args[0].copy_(kept) if func._schema.is_mutable else kept


@contextmanager
def _both(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def _frozen_statistics(norms: list[_NormBase]) -> Iterator[None]:
    """Freeze the norms' statistics: momentum 0 writes them back unchanged, and a norm without its counter counts no batches.

    torch.nn.SyncBatchNorm raises an error if it has no counter: it gets a copy to count in.
    """
    saved = [(m.momentum, m.num_batches_tracked) for m in norms]
    try:
        for m, (_, counter) in zip(norms, saved, strict=True):
            copied = counter.clone() if counter is not None and isinstance(m, torch.nn.SyncBatchNorm) else None
            m.momentum, m.num_batches_tracked = 0.0, copied
        yield
    finally:
        for m, (momentum, counter) in zip(norms, saved, strict=True):
            m.momentum, m.num_batches_tracked = momentum, counter


Packed = torch.Tensor | tuple[torch.device, torch.Tensor]


def offload_forward(model: torch.nn.Module, min_bytes: int) -> None:
    """Wrap the model's forward, in place: saved tensors go to the host at once, and return at their use.

    torch's own save_on_cpu copies the weights too, and waits for each copy. Here the copies are queued on the computing stream:
    the device's memory is reused only after them, and pinned memory is kept until its copies are done.
    """

    def pack(tensor: torch.Tensor) -> Packed:
        if is_weight(tensor) or tensor.nbytes < min_bytes or tensor.layout != torch.strided:
            return tensor
        pinned = tensor.device.type == "cuda"
        # With its strides: the backward's kernels may depend on them.
        host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        return tensor.device, host.copy_(tensor, non_blocking=pinned)

    def unpack(packed: Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    def wrapped(forward: Callable[..., Tree]) -> Callable[..., Tree]:
        @functools.wraps(forward)
        def offloaded(*args: Tree, **kwargs: Tree) -> Tree:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return offloaded

    wrap_forward(model, wrapped)


def is_weight(tensor: torch.Tensor) -> bool:
    """True if a saved tensor is a parameter, or autocast's copy of one, or a view of either."""
    whole: Any = tensor if tensor._base is None else tensor._base
    if whole.grad_fn is not None and whole.grad_fn.name() == "ToCopyBackward0":
        whole = getattr(whole.grad_fn.next_functions[0][0], "variable", None)  # the original of the copy, if it is a leaf
    return isinstance(whole, torch.nn.Parameter)
