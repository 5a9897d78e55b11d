"""The rehearsal of a built trainer's step on tensors without values: its memory, its operations, and the batch that fits.

Each operation is recorded with its work, and each storage from its allocation to its end. The trainer's values do not change.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.nn import functional
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from drivetrain.checkpointing.recompute import checkpoint_forward
from drivetrain.core.machine.torch_patches import fake_addresses
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.engine.trainer import Trainer

Kind = Literal["view", "product", "convolution", "attention", "pointwise", "update"]
KINDS: dict[Kind, tuple[str, ...]] = {  # the beginnings of the operations' names
    "attention": ("_scaled_dot_product", "_flash_attention", "_efficient_attention"),
    "convolution": ("convolution", "_convolution"),
    "update": ("_foreach", "_fused_ad", "_fused_sgd", "_amp_foreach"),
}
CPU_ATTENTION: dict[str, tuple[Callable[..., int], int]] = {  # torch's formula for a GPU, and its number of arguments
    "_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}


@dataclass(frozen=True)
class Spec:
    """A tensor's shape, without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, each once."""
        read = (size for size, stride in zip(self.shape, self.stride, strict=True) if stride)  # an expanded one is read once
        return math.prod(read) * self.dtype.itemsize


@dataclass(frozen=True)
class Operation:
    """An operation of a step. Two with the same signature do the same work."""

    signature: str
    kind: Kind = field(compare=False)
    phase: str  # forward, backward or update
    flops: int = field(compare=False)
    nbytes: int = field(compare=False)  # read and written
    result_bytes: int = field(compare=False)  # newly allocated
    dtype: torch.dtype = field(compare=False)  # of the computation
    call: tuple[OpOverload[..., object], tuple[object, ...], Mapping[str, object]] = field(
        compare=False, repr=False
    )  # the function, and its arguments with specs instead of tensors


def describe(
    func: OpOverload[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], out: object, phase: str = "forward"
) -> Operation | None:
    """Describe a call by its arguments and results; None for a call without work, such as reading a tensor's device."""
    if func.namespace in ("prim", "profiler"):
        return None
    specs, kind = tree_map(_spec_of, (args, kwargs)), _kind(func)
    inputs, results = _specs(specs), _specs(out)
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
    return Operation(signature, kind, phase, _flops(func, args, kwargs, out), nbytes, made, dtype, (func, *specs))


def _spec_of(value: object) -> object:
    return Spec(tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, torch.Tensor) else value


def _specs(tree: object) -> list[Spec]:
    return [leaf for leaf in map(_spec_of, tree_leaves(tree)) if isinstance(leaf, Spec)]


def _kind(func: OpOverload[..., object]) -> Kind:
    returns, name = func._schema.returns, func._overloadpacket.__name__
    if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
        return "view"
    for kind, beginnings in KINDS.items():
        if name.startswith(beginnings):
            return kind
    return "product" if func._overloadpacket in flop_registry else "pointwise"


def _flops(func: OpOverload[..., object], args: tuple[Any, ...], kwargs: Mapping[str, object], out: object) -> int:
    """The formulas of torch's FlopCounterMode; attention on a CPU, which has none, counts like a GPU's."""
    if (name := func._overloadpacket.__name__) in CPU_ATTENTION:
        attention, count = CPU_ATTENTION[name]
        return int(attention(*(tuple(t.shape) for t in args[:count])))
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


OTHER = "activations"  # any other storage: saved activations and temporary results


class _Converter(FakeTensorConverter):
    """Keeps no weak references to fake tensors: torch does not convert or move a module's parameter that has one."""

    def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor) -> None:
        pass


class Fakes(FakeTensorMode):
    """torch's fake tensors, which have shapes and no values.

    Real tensors in the same operation count as fake ones of their shape.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Converter()
        self._standing: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id → the real tensor, kept alive, and its fake
        self._addresses: dict[int, int] = {}  # of the real tensors' memory, by the fakes' storages

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Answer reads of values, as in torch's trunc_normal_ or in an edit that compares results."""
        if func._schema.name == "aten::allclose":
            return True
        if func._schema.name == "aten::_local_scalar_dense":
            return _value(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def standing_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor of a real one: always the same, on one storage with its views' fakes."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._standing:
            with _disable_current_modes():
                plain = tensor.detach().requires_grad_(False)  # torch has no fakes for views of a tensor changed in place
            self._standing[id(tensor)] = tensor, self.from_tensor(plain)
            self._addresses[self._standing[id(tensor)][1].untyped_storage()._cdata] = plain.untyped_storage().data_ptr()
        return self._standing[id(tensor)][1]

    @contextmanager
    def as_parameters(self) -> Iterator[None]:
        """Within the context modules get fake parameters. Their memory was reserved, and is never filled."""

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
        """Within the context a fake tensor has the address of its real memory, by which optimizers recognise views."""

        def data_ptr(tensor: FakeTensor) -> int:
            storage: int = tensor.untyped_storage()._cdata
            return self._addresses.get(storage, storage) + int(tensor.storage_offset()) * tensor.element_size()

        with fake_addresses(data_ptr):
            yield


@dataclass(eq=False)
class WorkCounter(TorchDispatchMode):
    """Counts bytes and operations while it is entered, above a `Fakes` mode.

    It holds no tensor, so that each is freed when the step frees it.
    """

    fakes: Fakes
    operations: Counter[Operation] = field(default_factory=Counter)
    most_during: dict[str, int] = field(default_factory=dict)  # by signature: the bytes allocated when it has made its results
    times: int = 1  # for which an operation counts; memory counts in any case
    phase: str = "forward"  # of the step; the backward is recognised without it
    kinds: list[str] = field(default_factory=list)  # of every storage, by its number
    log: list[tuple[int, int]] = field(default_factory=list)  # of allocations and releases: the storage's number, bytes more
    now_bytes: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._living: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

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
        if name not in MAKES_CONSTANT and not all(isinstance(t, FakeTensor) for t in tensors):
            args, kwargs = tree_map_only(torch.Tensor, self.fakes.standing_for, (args, kwargs))
        out = None if name in NO_FAKE_FORM else func(*args, **kwargs)
        if name in FILLS and isinstance(out, torch.Tensor) and out.dim() == 0 and out.device.type == "cpu":
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
        if (key := storage._cdata) not in self._living:
            number, nbytes = len(self.kinds), storage.nbytes()
            self.kinds.append(OTHER)
            self._living[key] = number, weakref.ref(storage, lambda _: self._count(self._living.pop(key)[0], -nbytes))
            self._count(number, nbytes)
        if kind:
            self.kinds[self._living[key][0]] = kind

    def _count(self, number: int, nbytes: int) -> None:
        self.log.append((number, nbytes))
        self.now_bytes += nbytes

    def at_peak(self) -> Counter[str]:
        """The bytes of each kind when most were allocated."""
        totals = list(accumulate(nbytes for _, nbytes in self.log))
        found: Counter[str] = Counter()
        for number, nbytes in self.log[: totals.index(max(totals)) + 1]:
            found[self.kinds[number]] += nbytes
        return +found


MAKES_CONSTANT = ("aten::lift_fresh", "aten::lift_fresh_copy")  # of torch.tensor(1.0): the resulting fake keeps its value
FILLS = ("aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor")  # these make a tensor of one number
NO_FAKE_FORM = ("aten::_fused_sgd_", "aten::_fused_adagrad_")  # updates in place, which fake tensors can skip


def _constant(func: OpOverload[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> torch.Tensor:
    """The fake of a single number. It keeps its value, as the fake of torch.tensor(1.0) does."""
    with _disable_current_modes():
        real = func(*args, **kwargs)
    made: torch.Tensor = torch.ops.aten.lift_fresh.default(real)
    return made


def _value(tensor: torch.Tensor) -> object:
    """The value that the host reads from a tensor, where it is known, such as an optimizer's count of updates.

    Every other fake tensor reads as 0, such as the flag of an overflow.
    """
    if isinstance(tensor, FakeTensor):
        if tensor.constant is not None:  # made from plain numbers: torch keeps its value
            with _disable_current_modes():
                return tensor.constant.item()
        return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0
    with _disable_current_modes():
        return tensor.tolist()


PARAMETERS, GRADIENTS, STATE, BATCH = "parameters", "gradients", "optimizer state", "batch"
BY_LINE = 4  # tries by linear interpolation of peaks; the first is nearly exact, as most memory is linear in the number
CLOSE = 0.02  # of the limit: near enough
BUFFERS = 0.1  # of the activations: kernels' own buffers, which fake tensors do not show
HEAP = 1.0  # of the activations: the further heap of a process on a CPU, approximately


@dataclass
class StepRecord:
    """The cost of an update: bytes by kind at the peak, and its operations with their numbers."""

    peak: Counter[str]
    most_during: dict[str, int]  # by an operation's signature: the bytes allocated when it has made its results
    operations: Counter[Operation]


@dataclass
class Rehearsal:
    """A trainer whose step runs on fake tensors. It cannot train afterwards: its optimizer's state has no values."""

    trainer: Trainer
    sample: MicroBatch = field(init=False)  # a real one of two samples, the longest ones, for its shapes
    fakes: Fakes = field(init=False)  # of the model's weights, where these are fake already
    # By the samples of a micro-batch, the number of micro-batches, and the number of recomputed blocks.
    records: dict[tuple[int, int, int], StepRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modes = (p.fake_mode for p in self.trainer.model.parameters() if isinstance(p, FakeTensor))
        self.fakes = next((mode for mode in modes if isinstance(mode, Fakes)), None) or Fakes()
        trainer = self.trainer
        indices = trainer.batch.largest(len(trainer.train_data.source), 2)
        self.sample = next(iter(trainer.read([Request(0, indices, 1.0)])))

    def record(self, size: int, micro_batches: int, blocks: Sequence[torch.nn.Module] = ()) -> StepRecord:
        """The record of updates with micro-batches of `size` and these blocks recomputed too, made once."""
        key = size, micro_batches, len(blocks)
        if key not in self.records:
            with ExitStack() as undone:
                for block in blocks:
                    undone.callback(checkpoint_forward(block))
                self.records[key] = self._recorded(size, micro_batches)
        return self.records[key]

    def _recorded(self, size: int, micro_batches: int) -> StepRecord:
        """Record two updates, the second with its operations, because only then there is optimizer state.

        The peak is over both. Of an update's micro-batches two are run: the first sets gradients, any other adds to them.
        """
        self.trainer.model.train()
        with self.fakes, self.fakes.with_addresses():
            recorder = WorkCounter(self.fakes)
            self._note_resident(recorder)
            for times in [[0]] * (not self.records) + [[1, micro_batches - 1] if micro_batches > 1 else [1]]:
                with recorder:
                    self._update(recorder, size, times, 1 / micro_batches)
        return StepRecord(recorder.at_peak(), recorder.most_during, recorder.operations)

    def _update(self, recorder: WorkCounter, size: int, times: list[int], weight: float) -> None:
        """Run an update; `times` gives for each micro-batch how often its operations count."""
        trainer, loss_sum = self.trainer, torch.zeros((), device=self.trainer.device)
        recorder.phase = "forward"
        for number, recorder.times in enumerate(times, 1):
            batch = _enlarged(self.sample, size, weight, number == len(times))
            for leaf in (*trees.leaves(batch.x), *trees.leaves(batch.y)):
                recorder.note(leaf, BATCH)
            trainer.step.micro_batch(batch, loss_sum)
            del batch, leaf
        recorder.phase, recorder.times = "update", times[0]

        def note(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                recorder.note(parameter.grad, GRADIENTS)

        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            note(parameter)
        within = [p.register_post_accumulate_grad_hook(note) for p in trained]  # a closure's, or phases'
        trainer.step.update()
        for handle in within:
            handle.remove()
        trainer.ema.update()
        self._note_resident(recorder)
        trainer.step.zero_grad()

    def _note_resident(self, recorder: WorkCounter) -> None:
        """Count the tensors that stay in memory between updates."""
        for kind, tensors in resident(self.trainer).items():
            for tensor in tensors:
                recorder.note(self.fakes.standing_for(tensor), kind)


def resident(trainer: Trainer) -> dict[str, list[torch.Tensor]]:
    """The tensors that stay in memory between updates, by kind. A tensor of several kinds counts in the last one."""
    held = [vars(part) for part in (trainer.optimizer, trainer.precision, trainer.ema)]
    return {STATE: list(_tensors(held, set())), PARAMETERS: [*trainer.model.parameters(), *trainer.model.buffers()]}


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in containers and in parts of an optimizer, however deep."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif type(leaf).__module__.startswith("drivetrain.optimizer.") and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _tensors(vars(leaf), seen)


def _enlarged(sample: MicroBatch, size: int, weight: float, last: bool) -> MicroBatch:
    """A fake micro-batch of `size` samples shaped like the given ones."""

    def enlarge(tensor: torch.Tensor) -> torch.Tensor:
        dense = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        memory_format = torch.channels_last if dense else torch.contiguous_format
        return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device, memory_format=memory_format)

    x, y = trees.map_tensors(enlarge, sample.x), trees.map_tensors(enlarge, sample.y)
    return MicroBatch(x, y, torch.full_like(sample.weight, weight), last, last)


# The part of torch's list "CUDA Ops that can autocast to float32" that the CPU's autocast computes in 16 bits.
IN_FLOAT32: frozenset[Callable[..., object]] = frozenset((
    functional.layer_norm, functional.group_norm, functional.softmax, functional.log_softmax, functional.cross_entropy,
    functional.nll_loss, functional.softplus, functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss,
    functional.kl_div, functional.cosine_similarity, functional.normalize, torch.softmax, torch.log_softmax, torch.exp, torch.log,
    torch.pow, torch.sum, torch.prod, torch.cumsum, torch.norm, torch.rsqrt, torch.Tensor.softmax, torch.Tensor.log_softmax,
    torch.Tensor.exp, torch.Tensor.log, torch.Tensor.pow, torch.Tensor.sum, torch.Tensor.prod, torch.Tensor.cumsum,
    torch.Tensor.norm, torch.Tensor.rsqrt,
))  # fmt: skip


class CudaAutocast(TorchFunctionMode):
    """Gives these operations their inputs in float32 while autocast is on."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def largest_micro_batch(trainer: Trainer, most: int, limit: float) -> int:
    """The most samples, up to `most`, whose step is forecast to fit into `limit` bytes of tensors; 0: not even two.

    The trainer cannot train afterwards. Raises the step's own error where it needs values.
    """
    beside = HEAP if trainer.device.type == "cpu" else BUFFERS  # trials on a CPU are judged by the process's memory
    rehearsal = Rehearsal(trainer)
    size, peak = furthest(lambda n: peak_bytes(rehearsal.record(n, -(-most // n)), beside), min(2, most), most, limit)
    return size if peak <= limit else 0


def fewest(peak: Callable[[int], float], most: int, limit: float) -> tuple[int, float]:
    """The smallest count up to `most` whose peak is within the limit, with the peak; `most` where none is.

    It counts the recomputed blocks of a model, from its first one on: their activations are kept longest.
    """
    kept, nbytes = furthest(lambda kept: peak(most - kept), 0, most, limit, exact=True)
    return most - kept, nbytes


def peak_bytes(record: StepRecord, beside: float = BUFFERS) -> float:
    """The bytes of a step's tensors at their peak, plus `beside` times those of the activations."""
    return sum(record.peak.values()) + beside * record.peak[OTHER]


def furthest(peak: Callable[[int], float], low: int, high: int, limit: float, exact: bool = False) -> tuple[int, float]:
    """The largest number from `low` to `high` whose peak is within a limit, with the peak; `low` where none is.

    `peak` must not fall. Without `exact` a number that is near enough is returned.
    """
    if (at_high := peak(high)) <= limit:
        return high, at_high
    at_low, tried = peak(low), 0
    while at_low <= limit and high - low > 1 and (exact or (tried < BY_LINE and at_low < (1 - CLOSE) * limit)):
        share = (limit - at_low) / (at_high - at_low) if tried < BY_LINE else 0.5
        number, tried = min(max(low + int(share * (high - low)), low + 1), high - 1), tried + 1
        if (at := peak(number)) <= limit:
            low, at_low = number, at
        else:
            high, at_high = number, at
    return low, at_low
