"""Records torch's operations, also those of a backward, each with the user's line that called it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType

import torch
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.core.machine.device import Clock, Mark
from drivetrain.measure.profile.user_code import Found, find

FACTORIES = ("randperm", "rand", "randn", "randint", "arange", "zeros", "ones", "full", "empty", "eye", "linspace", "tensor")
# The operations of torch.nn's layers, by the beginnings of the operations' names: a model may call them without a module.
_OF_LAYERS = (
    "convolution", "cudnn_", "miopen_", "mkldnn_", "addmm", "mm", "bmm", "baddbmm", "linear", "_scaled_dot_product",
    "_efficient_att", "_flash_att", "_fused_sdp", "embedding", "native_batch_norm", "_native_batch_norm", "_batch_norm",
    "native_layer_norm",
    "native_group_norm", "_fused_rms", "relu", "gelu", "silu", "leaky_relu", "elu", "hardswish", "hardtanh", "mish", "sigmoid",
    "tanh", "softplus", "_softmax", "_log_softmax", "log_sigmoid", "native_dropout", "max_pool", "avg_pool", "adaptive_",
    "_adaptive_", "mean", "upsample_", "nll_loss", "binary_cross_entropy", "mse_loss", "smooth_l1", "huber_loss", "_cudnn_rnn",
)  # fmt: skip


@dataclass
class TimedOperation:
    """One operation of the forward or of other code; the time of its backward is added when it runs."""

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
    wasted: bool = False  # its result takes no part in the backward

    @property
    def needed(self) -> bool:
        """True if the model's own layers need it."""
        return self.layer and not self.wide and not self.wasted


class OperationRecorder(TorchDispatchMode):
    """Records operations while it is entered. Their times exclude its own, which is longer."""

    def __init__(self, phase: Callable[[], str], clock: Clock, root: CodeType, small_size: int) -> None:
        """`small_size`: the elements of a tensor that is small."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase, self.clock, self.root, self.small_size = phase, clock, root, small_size
        self.operations: list[TimedOperation] = []
        self._of_node: dict[int, TimedOperation] = {}
        self._marks: list[tuple[TimedOperation, bool, Mark, Mark]] = []
        self._visited: set[int] = set()
        self._next_node = _next_node()
        self._last: TimedOperation | None = None  # whose backward ran last

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        operation, backward = self._operation(func, args)
        began = self.clock.mark()
        out = func(*args, **(kwargs or {}))
        ended = self.clock.mark()
        if operation is not None:
            self._marks.append((operation, backward, began, ended))
            if not backward:
                _describe(operation, out, self.small_size)
        return out

    def _operation(self, func: OpOverload[..., object], args: tuple[object, ...]) -> tuple[TimedOperation | None, bool]:
        """Return the operation that the time belongs to, and whether this is its backward."""
        found = find(sys._getframe(2), self.root)
        node = torch._C._current_autograd_node()
        if node is not None and found.site is None:
            return self._forward_of(node), True
        name = func._schema.name.removeprefix("aten::")
        nodes = range(self._next_node, _next_node())
        trains = bool(nodes) and (name.startswith(_OF_LAYERS) or _has_weights(args))  # a layer's mathematics without a module
        layer = found.in_layer or found.site is None or trains
        frozen = not nodes and not _has_weights(args)
        operation = TimedOperation(name, found, self.phase(), layer, False, False, False, nodes, frozen)
        self._of_node.update(dict.fromkeys(nodes, operation))
        self._next_node = max(nodes.stop, self._next_node)
        self.operations.append(operation)
        return operation, False

    def _forward_of(self, node: Node) -> TimedOperation | None:
        """Return the operation whose backward a node is; for a node that only adds up gradients, that of the last one.

        The node counts as visited, with all later ones of the backward.
        """
        nodes = [node] if node._sequence_nr() not in self._visited else []
        while nodes:
            visited = nodes.pop()
            number = visited._sequence_nr()
            if number in self._visited and number < 2**63:
                continue
            self._visited.add(number)
            nodes += [following for following, _ in visited.next_functions if following is not None]
        self._last = self._of_node.get(node._sequence_nr(), self._last)
        return self._last

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


def _next_node() -> int:
    """Return the number of the next node that this thread adds to a graph."""
    return torch._C._autograd._get_sequence_nr()


def _has_weights(args: tuple[object, ...]) -> bool:
    return any(isinstance(a, torch.nn.Parameter) and a.requires_grad for a in args)


def _describe(operation: TimedOperation, out: object, small_size: int) -> None:
    if tensors := [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, torch.Tensor)]:
        operation.wide = tensors[0].dtype in (torch.float64, torch.complex128)
        operation.small = tensors[0].numel() <= small_size
        operation.creates = operation.name in FACTORIES and tensors[0].device.type == "cpu"
