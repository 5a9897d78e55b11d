"""Records every operation of a few updates: which call of the user's made it, its time forward and backward, and its need."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.core.clock import Clock, Mark, clock_for
from drivetrain.measure.profile.sites import Found, find

FACTORIES = ("randperm", "rand", "randn", "randint", "arange", "zeros", "ones", "full", "empty", "eye", "linspace", "tensor")
# What torch.nn's layers do, by the beginnings of the operations' names: a model may call them without a module.
_OF_LAYERS = (
    "convolution", "cudnn_", "miopen_", "mkldnn_", "addmm", "mm", "bmm", "baddbmm", "linear", "_scaled_dot_product",
    "_efficient_att", "_flash_att", "_fused_sdp", "embedding", "native_batch_norm", "_native_batch_norm", "_batch_norm",
    "native_layer_norm",
    "native_group_norm", "_fused_rms", "relu", "gelu", "silu", "leaky_relu", "elu", "hardswish", "hardtanh", "mish", "sigmoid",
    "tanh", "softplus", "_softmax", "_log_softmax", "log_sigmoid", "native_dropout", "max_pool", "avg_pool", "adaptive_",
    "_adaptive_", "mean", "upsample_", "nll_loss", "binary_cross_entropy", "mse_loss", "smooth_l1", "huber_loss", "_cudnn_rnn",
)  # fmt: skip


@dataclass
class Operation:
    """One operation of the forward, or of any other code; its backward is added once that runs."""

    name: str
    found: Found
    phase: str
    layer: bool  # a layer of the model makes it
    wide: bool  # it computes in float64
    small: bool
    creates: bool  # it creates a tensor on the CPU
    nodes: range = range(0)  # the numbers of its nodes in the graph of the backward
    frozen: bool = False  # it has no node, and needs none: it has no weights that train
    ms: float = 0.0
    backward_ms: float = 0.0
    backward_operations: int = 0
    wasted: bool = False  # nothing of it takes part in the backward

    @property
    def needed(self) -> bool:
        """Whether the model's own layers need it."""
        return self.layer and not self.wide and not self.wasted


@dataclass
class Recorder(TorchDispatchMode):
    """Records operations while it is entered. Its own time, which is more than theirs, is not in theirs."""

    phase: Callable[[], str]
    clock: Clock
    root: CodeType
    small_size: int  # elements
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._of_node: dict[int, Operation] = {}
        self._marks: list[tuple[Operation, bool, Mark, Mark]] = []
        self._visited: set[int] = set()
        self._next_node = _next_node()
        self._last: Operation | None = None  # whose backward ran last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation, backward = self._operation(func, args)
        began = self.clock.mark()
        out = func(*args, **(kwargs or {}))
        ended = self.clock.mark()
        if operation is not None:
            self._marks.append((operation, backward, began, ended))
            if not backward:
                _describe(operation, out, self.small_size)
        return out

    def _operation(self, func: Any, args: Any) -> tuple[Operation | None, bool]:
        """Return the operation that the time belongs to, and whether this is its backward."""
        found = find(sys._getframe(2), self.root)
        node = torch._C._current_autograd_node()
        if node is not None and found.site is None:
            return self._forward_of(node), True
        name = func._schema.name.removeprefix("aten::")
        nodes = range(self._next_node, _next_node())
        layer = found.in_layer or found.site is None or _is_layers(name, args, bool(nodes))
        operation = Operation(name, found, self.phase(), layer, False, False, False, nodes)
        operation.frozen = not nodes and not _has_weights(args)
        self._of_node.update(dict.fromkeys(nodes, operation))
        self._next_node = max(nodes.stop, self._next_node)
        self.operations.append(operation)
        return operation, False

    def _forward_of(self, node: Any) -> Operation | None:
        """Return the operation whose backward a node is; that of the last one, where a node only adds up gradients."""
        number = node._sequence_nr()
        if number not in self._visited:
            self._visit(node)
        self._last = self._of_node.get(number, self._last)
        return self._last

    def _visit(self, node: Any) -> None:
        """Note a node and all that come after it in the backward."""
        nodes = [node]
        while nodes:
            node = nodes.pop()
            number = node._sequence_nr()
            if number in self._visited and number < 2**63:
                continue
            self._visited.add(number)
            nodes += [following for following, _ in node.next_functions if following is not None]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations of the block, and read their times at its end."""
        with self:
            yield
        for operation, backward, began, ended in self._marks:
            ms = 1e3 * self.clock.seconds(began, ended)
            if backward:
                operation.backward_ms += ms
                operation.backward_operations += 1
            else:
                operation.ms += ms
        for operation in self.operations:
            operation.wasted = not operation.frozen and not any(n in self._visited for n in operation.nodes)
        self._marks.clear()


class _ThreadClock(Clock):
    """The thread's time on a core: what else a busy machine does is no operation's."""

    def mark(self) -> Mark:
        return time.thread_time()


def operation_clock(device: torch.device) -> Clock:
    """Return the clock of operations on a device."""
    return _ThreadClock() if device.type == "cpu" else clock_for(device)


def _next_node() -> int:
    """Return the number of the next node that this thread adds to a graph."""
    return int(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _is_layers(name: str, args: Any, trains: bool) -> bool:
    """Whether a call without a module is one of a layer: a layer's mathematics, or with weights, that trains."""
    return trains and (name.startswith(_OF_LAYERS) or _has_weights(args))


def _has_weights(args: Any) -> bool:
    return any(isinstance(a, torch.nn.Parameter) and a.requires_grad for a in args)


def _describe(operation: Operation, out: Any, small_size: int) -> None:
    if not isinstance(out, torch.Tensor):
        out = next((o for o in out if isinstance(o, torch.Tensor)), None) if isinstance(out, tuple | list) else None
    if out is not None:
        operation.wide = out.dtype in (torch.float64, torch.complex128)
        operation.small = out.numel() <= small_size
        operation.creates = operation.name in FACTORIES and out.device.type == "cpu"
