"""Profiles a run's step: where its time goes, and which of the user's own lines take it.

A timer interrupts the thread at random instants, and the line that it is at then is counted. What the device and the backward
do is known by the operations, each recorded with the line that called it.
"""

from __future__ import annotations

import dataclasses
import dis
import linecache
import os
import random
import signal
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch._C._autograd import DeviceType
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.core.errors import Diverged
from drivetrain.core.machine import process
from drivetrain.core.machine.device import Clock, Mark, clock_for, synchronize
from drivetrain.core.machine.guards import usable_cores
from drivetrain.core.machine.torch_patches import threads_set_by
from drivetrain.core.step import trees
from drivetrain.core.step.microbatch import MicroBatch, one_update
from drivetrain.debug.profile import silence_profiler
from drivetrain.debug.torch_modes import waiting_calls
from drivetrain.engine.callbacks import CallbackStep
from drivetrain.engine.flops import measured
from drivetrain.engine.step import PlainStep
from drivetrain.engine.trainer import Trainer
from drivetrain.engine.update_step import UpdateStep
from drivetrain.measure import intervals
from drivetrain.measure.benchmark.interleave import WARMUP_UPDATES
from drivetrain.measure.forecast.replay import bandwidth
from drivetrain.precision.base import backpropagate
from drivetrain.saving import checkpoint_io

_LIBRARIES = tuple(
    str(Path(place)) + os.sep
    for place in (
        Path(torch.__file__).parent,
        process.PACKAGE,
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
    )
)
_SHOWN = 60  # characters of a line's text


class Site(NamedTuple):
    """One call in the user's own code: several may stand on one line."""

    code: CodeType
    instruction: int

    @property
    def line(self) -> int:
        """The number of its line."""
        number, *_ = next(islice(self.code.co_positions(), max(0, self.instruction // 2), None), (None,))
        return number or self.code.co_firstlineno

    @property
    def place(self) -> str:
        """`file:line in function`."""
        name = self.code.co_filename
        shown = os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name
        return f"{shown}:{self.line} in {self.code.co_name}"

    @property
    def text(self) -> str:
        """The text of its line."""
        text = linecache.getline(self.code.co_filename, self.line).partition("  #")[0].strip()
        return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


class Found(NamedTuple):
    """The facts that a stack shows."""

    site: Site | None = None  # of the innermost frame of the user's own
    in_layer: bool = False  # it called a module of a library, such as one of torch.nn
    in_backward: bool = False  # the backward runs, and no code of the user's within it


@cache
def is_users(code: CodeType) -> bool:
    """True if code is neither of Python's library, nor of torch, an installed package or drivetrain."""
    name = code.co_filename
    return code.co_name != "<module>" and os.sep in name and not name.startswith(("<", *_LIBRARIES))


_MODULE_CALL = torch.nn.Module._call_impl.__code__
_BACKWARD = (torch.autograd.graph._engine_run_backward.__code__, backpropagate.__code__)  # they wait until the backward is done


def find(frame: FrameType | None, root: CodeType | None = None) -> Found:
    """Look for the user's own code in a stack, within what the frame of `root` called."""
    in_layer = False
    while frame is not None and frame.f_code is not root:
        code = frame.f_code
        if is_users(code):
            within = root is None or any(caller.f_code is root for caller, _ in traceback.walk_stack(frame))
            return Found(Site(code, frame.f_lasti), in_layer) if within else Found()
        if code in _BACKWARD:
            return Found(in_backward=True)
        in_layer = in_layer or code is _MODULE_CALL
        frame = frame.f_back
    return Found()


def user_line(frame: FrameType | None, root: CodeType | None = None) -> str:
    """file:line of the innermost frame that is not in Python's library, torch, an installed package or drivetrain; "": none."""
    site = find(frame, root).site
    return site.place if site is not None else ""


SAMPLE_S = 0.001  # between two instants, on average
LOOK_S = 0.002  # between two looks at the other threads, on average
SWITCH_S = 1e-4  # within which a thread that runs Python code lets another look at it; else that waits until torch is called


class Spent(NamedTuple):
    """Seconds of a thread."""

    busy: float = 0.0  # on a core
    waits: float = 0.0  # in which it had nothing to do
    wall: float = 0.0  # of a clock: with those in which it waited for a core that other work had

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        return Spent(self.busy + other.busy, self.waits + other.waits, self.wall + other.wall)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.busy - other.busy, self.waits - other.waits, self.wall - other.wall)

    @property
    def own(self) -> float:
        """All but those in which it waited for a core."""
        return self.busy + self.waits


Clocks = Callable[[], Spent]
Samples = Mapping[tuple[str, Found], Spent]


@contextmanager
def sampled(phase: Callable[[], str], root: CodeType, helpers: bool = False) -> Iterator[tuple[Clocks, Samples]]:
    """Sample the calling thread's stack until the block ends. Yield a clock of the block, and the samples, which come at its end.

    The instants do not depend on what the thread does, so a line gets as many of them as its share of the time. Only Python
    code can be interrupted: the instants that fall into a call of C, such as an operation of torch, are counted when it
    returns, at the line that called it. The time of counting is taken out. What threads do that work for this one, such as
    those of the loader, another thread looks at: only where there are such `helpers`, as it takes turns with this one.
    """
    instants = _Instants(thread_clock(), lambda frame: (phase(), find(frame, root)))
    looks: defaultdict[tuple[str, Found], Counter[Found]] = defaultdict(Counter)
    samples: defaultdict[tuple[str, Found], Spent] = defaultdict(Spent)
    with ExitStack() as watchers:
        watchers.enter_context(_interrupted(instants))
        if helpers:
            watchers.enter_context(_looked_at(phase, root, looks))
        yield thread_clock(), samples
    for place, seconds in instants.spent.items():  # where it waited for others, by what was seen of these
        seen = looks.get(place) or Counter({place[1]: 1})
        for found, count in seen.items():
            part = count / seen.total()
            samples[place[0], found] += Spent(part * seconds.busy, part * seconds.waits)


class _Instants:
    """Counts random instants, and the seconds that they stand for, by what the thread does then."""

    def __init__(self, clock: Clocks, place: Callable[[FrameType | None], tuple[str, Found]]) -> None:
        self.spent: defaultdict[tuple[str, Found], Spent] = defaultdict(Spent)
        self._clock, self._place = clock, place
        self._draw = random.Random(0)
        self._before = clock()
        self._counting = 0.0  # seconds
        self._next = self._before.wall + self._pause()

    def _pause(self) -> float:
        return SAMPLE_S * self._draw.uniform(0.5, 1.5)  # not even: it could keep in step with what is sampled

    def count(self, frame: FrameType | None) -> float:
        """Count the instants since the last call at what `frame` does. Return the seconds until the next one."""
        now = self._clock()
        instants = 0
        while self._next <= now.wall - self._counting:
            self._next += self._pause()
            instants += 1
        since = now - self._before
        if instants and since.wall > 0:
            own = instants * SAMPLE_S * min(1.0, max(0.0, since.own / since.wall))
            busy = own * min(1.0, since.busy / since.own) if since.own > 0 else 0.0
            self.spent[self._place(frame)] += Spent(busy, own - busy)
        self._before = self._clock()
        self._counting += self._before.wall - now.wall
        return max(1e-6, self._next + self._counting - self._before.wall)


@contextmanager
def _interrupted(instants: _Instants) -> Iterator[None]:
    """Let a timer interrupt this thread at the instants."""

    ended = False

    def interrupt(_: int, frame: FrameType | None) -> None:
        pause = instants.count(_caller_if_new(frame))
        if not ended:  # the last signal may be handled after the timer was stopped
            signal.setitimer(signal.ITIMER_REAL, pause)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, SAMPLE_S)
    try:
        yield
    finally:
        ended = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        # By default the signal ends the process, and another thread may still have one to take.
        signal.signal(signal.SIGALRM, signal.SIG_IGN if before == signal.SIG_DFL else before)


def _caller_if_new(frame: FrameType | None) -> FrameType | None:
    """The frame that was interrupted. An instant in the C code that called a function is seen where the function begins."""
    while frame is not None and frame.f_lasti in _beginnings(frame.f_code):
        frame = frame.f_back
    return frame


@cache
def _beginnings(code: CodeType) -> frozenset[int]:
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")


@contextmanager
def _looked_at(phase: Callable[[], str], root: CodeType, looks: dict[tuple[str, Found], Counter[Found]]) -> Iterator[None]:
    """Look again and again, in another thread, at the threads that work for this one, where it waits for them."""
    done, thread = threading.Event(), threading.get_ident()

    def repeat() -> None:
        draw = random.Random(1)
        while not done.wait(LOOK_S * draw.uniform(0.5, 1.5)):
            place = now, found = phase(), find(sys._current_frames().get(thread), root)
            if found.site is None and (found.in_backward or now == "data"):
                looks[place][next(_elsewhere(thread), found)] += 1

    watcher = threading.Thread(target=repeat, daemon=True, name="sampler")
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(before)


def _elsewhere(thread: int) -> Iterator[Found]:
    """Yield what threads do that work for this one: those of the loader, and torch's own of the backward."""
    pythons, loader = {t.ident for t in threading.enumerate()}, str(process.PACKAGE / "loader")
    for ident, frame in sys._current_frames().items():
        if ident == thread:
            continue
        works = ident not in pythons or any(f.f_code.co_filename.startswith(loader) for f, _ in traceback.walk_stack(frame))
        if works and (found := find(frame)).site is not None:
            yield found


def thread_clock() -> Clocks:
    """A clock of the calling thread, which begins now. Only Linux tells how long it waits for a core: elsewhere it never does."""
    queue = f"/proc/self/task/{threading.get_native_id()}/schedstat"

    def clock() -> Spent:
        queued = 0.0
        with suppress(FileNotFoundError), open(queue, "rb", buffering=0) as file:
            queued = int(file.read(128).split()[1]) / 1e9
        wall, busy = time.perf_counter(), time.thread_time()
        return Spent(busy, wall - queued - busy, wall)

    began = clock()
    return lambda: clock() - began


def own_seconds(work: Callable[[], object]) -> float:
    """The seconds that it takes, less those in which this thread waits for a core that other work has."""
    clock = thread_clock()
    work()
    return clock().own


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
        """True if the model's own layers need it."""
        return self.layer and not self.wide and not self.wasted


class OperationRecorder(TorchDispatchMode):
    """Records operations while it is entered. Its own time, which is more than theirs, is not in theirs."""

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
        operation = TimedOperation(name, found, self.phase(), layer, False, False, False, nodes)
        operation.frozen = not nodes and not _has_weights(args)
        self._of_node.update(dict.fromkeys(nodes, operation))
        self._next_node = max(nodes.stop, self._next_node)
        self.operations.append(operation)
        return operation, False

    def _forward_of(self, node: Node) -> TimedOperation | None:
        """Return the operation whose backward a node is; that of the last one, where a node only adds up gradients.

        The node counts as visited, with all that come after it in the backward.
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


class ThreadClock(Clock):
    """The thread's time on a core: what else a busy machine does is no operation's."""

    mark = staticmethod(time.thread_time)


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


MAX_OVERHEAD_MS = 0.01  # of one operation, for the engine of the backward and for recording it
WAITING = "waiting for data"


def together(several: Iterable[Samples]) -> Samples:
    """Add up samples."""
    total: defaultdict[tuple[str, Found], Spent] = defaultdict(Spent)
    for samples in several:
        for place, spent in samples.items():
            total[place] += spent
    return total


@dataclass
class CodeLine:
    """A line of the user's own code; shares are those of a step's time, counts those of one update."""

    place: str  # file:line in function
    text: str = ""
    reads_data: bool = False  # it runs while the step waits for the loader
    share: float = 0.0  # forward and backward, beyond what the model's layers need
    backward: float = 0.0  # the part of `share` that is its backward
    layers: float = 0.0  # the share that the model's layers take, which this line calls
    waits: float = 0.0  # the part of its time on the host in which it has no work for a core, 0 to 1
    operations: int = 0
    small_operations: int = 0  # on a sixteenth of the input's elements or less
    wide: float = 0.0  # the part of its operations' time that computes in float64
    wasted: float = 0.0  # the part of its operations' time that no backward needs, of weights that train
    names: tuple[str, ...] = ()  # of the operations that take most of its time
    host_reads: int = 0  # values read back to the host: .item(), float(), bool()
    created: float = 0.0  # the part of its operations' time that creates tensors on the CPU
    created_ms: dict[str, float] = field(default_factory=dict)  # by factory function, of tensors created on the CPU
    looks: tuple[float, ...] = ()  # `share` in each of several looks

    @property
    def interval(self) -> intervals.Interval:
        """`share` and its 95 % interval, by its spread over the looks; without these it has no width."""
        return intervals.around(self.share, self.looks)


@dataclass
class Attribution:
    """A step's time, by lines; the shares of all lines and of the rest add up to 1."""

    lines: list[CodeLine]  # the one with the largest share first
    rest: dict[str, float]  # by what it is, of time that no line of the user's called

    def with_reading(self, samples: Samples) -> Attribution:
        """Divide the waiting for data by samples of reading that was done elsewhere."""
        waiting = self.rest.get(WAITING, 0.0)
        lines = [replace(line, share=line.share * waiting, reads_data=True) for line in attribute(samples, [], 1).lines]
        return Attribution(lines + self.lines, {**self.rest, WAITING: waiting - sum(line.share for line in lines)})


def attribute(
    samples: Samples, operations: Iterable[TimedOperation], updates: int, busy: float = 0.0, watched: int | None = None
) -> Attribution:
    """Attribute a step's time. `operations` are those of several `updates`; `watched` updates were sampled.

    `busy` is the share of the time in which an accelerator works: that is divided by the operations' times on the
    device, and only the rest, in which the device waits for the host, by what the host does. A CPU's is 0.
    """
    operations = [o for o in operations if o.phase != "data"]
    calls: defaultdict[Site | None, list[TimedOperation]] = defaultdict(list)
    for operation in operations:
        calls[operation.found.site].append(operation)
    lines: dict[str, CodeLine] = {}
    line_of: dict[Site | None, CodeLine] = {}
    for site in dict.fromkeys([*calls, *(found.site for _, found in samples)]):
        if site is not None:
            line_of[site] = lines.setdefault(site.place, CodeLine(site.place, site.text))
    rest: defaultdict[str, float] = defaultdict(float)
    spent: defaultdict[str, Spent] = defaultdict(Spent)  # by line
    reading: defaultdict[str, float] = defaultdict(float)  # of it, while the step waits for data
    total = sum(each.own for each in samples.values()) or 1.0
    of_host, backward_s = 1.0 - busy, 0.0
    for (phase, found), seconds in samples.items():
        own = of_host * seconds.own / total
        if found.site is not None:
            line, needed = line_of[found.site], _needed(calls[found.site])
            line.share, line.layers = line.share + own * (1 - needed), line.layers + own * needed
            spent[line.place] += seconds
            reading[line.place] += seconds.own if phase == "data" else 0.0
        elif found.in_backward:
            backward_s += seconds.own
        else:
            rest[OF_NO_LINE[phase]] += own
    parts = _of_backward(operations, 1e3 * backward_s / watched * updates if watched else None)
    device_ms = sum(o.ms + o.backward_ms for o in operations) or 1.0
    for operation, part in zip(operations, parts, strict=True):
        backward = of_host * part * backward_s / total + busy * operation.backward_ms / device_ms
        both = busy * operation.ms / device_ms + backward
        if (known := line_of.get(operation.found.site)) is None:
            rest[OF_NO_LINE[operation.phase]] += both
        elif operation.needed:
            known.layers += both
        else:
            known.share, known.backward = known.share + both, known.backward + backward
    if not any(parts) and backward_s:
        rest["the backward"] = of_host * backward_s / total
    made: defaultdict[str, list[TimedOperation]] = defaultdict(list)
    for site, line in line_of.items():
        made[line.place] += calls[site]
    described = [_described(line, made[at], updates, spent[at], reading[at]) for at, line in lines.items()]
    return Attribution(sorted(described, key=lambda line: (-line.share, -line.operations)), dict(rest))


def _described(line: CodeLine, operations: Sequence[TimedOperation], updates: int, spent: Spent, reading: float) -> CodeLine:
    """The line with what is known of its operations, and of its seconds, of which some are spent on `reading`."""
    names, created = Counter[str](), Counter[str]()
    for o in operations:
        names[o.name] += o.ms + o.backward_ms  # type: ignore[assignment]
        if o.creates:
            created[o.name] += o.ms / updates  # type: ignore[assignment]

    def part(chosen: Iterable[TimedOperation]) -> float:
        return sum(o.ms + o.backward_ms for o in chosen) / names.total() if names.total() else 0.0

    return replace(
        line,
        reads_data=2 * reading > spent.own,
        waits=spent.waits / spent.own if spent.own else 0.0,
        operations=len(operations) // updates,
        small_operations=sum(o.small for o in operations) // updates,
        wide=part(o for o in operations if o.wide),
        wasted=part(o for o in operations if o.layer and o.wasted),
        names=tuple(name for name, _ in names.most_common(3)),
        created=part(o for o in operations if o.creates),
        created_ms=dict(created),
    )


OF_NO_LINE = {"data": WAITING, "micro_batch": "model and loss", "update": "the update"}


def _of_backward(operations: Sequence[TimedOperation], backward_ms: float | None) -> list[float]:
    """Return each operation's part of the backward, from their recorded times and `backward_ms`, which nothing watched.

    Beside its operations the backward has a small cost for each of them, which the records lack, and these have a small cost
    of their own for each: the difference tells both together.
    """
    count, recorded = sum(o.backward_operations for o in operations), sum(o.backward_ms for o in operations)
    more = (backward_ms - recorded) / count if count and backward_ms is not None else 0.0
    more = min(MAX_OVERHEAD_MS, max(-MAX_OVERHEAD_MS, more))
    parts = [max(0.0, o.backward_ms + more * o.backward_operations) for o in operations]
    total = sum(parts)
    return [part / total if total else 0.0 for part in parts]


def _needed(operations: Iterable[TimedOperation]) -> float:
    """The part of a call's time that the model's layers need: that of their operations among its own."""
    total = sum(o.ms for o in operations)
    return sum(o.ms for o in operations if o.needed) / total if total else 0.0


UPDATES = 3  # in which what reads a value back from the device is counted
LOOKS = 8  # in turns, in each of which an update is looked at in every way: their spread is that of the figures
MAX_SLOWER = 4  # times the wanted seconds, where other work has the cores
DATA = "data wait"


class TrackedStream(Iterator[MicroBatch]):
    """The training stream. `phase` says what runs: "data" while it is read, then "micro_batch", then "update"."""

    def __init__(self, stream: Iterator[MicroBatch]) -> None:
        self._stream, self.phase = stream, "micro_batch"

    def __next__(self) -> MicroBatch:
        self.phase = "data"
        try:
            return next(self._stream)
        finally:
            self.phase = "micro_batch"


def update(trainer: Trainer, stream: Iterator[MicroBatch]) -> None:
    """Run one update and what comes after it, as the training loop does."""
    progress = trainer.progress
    for micro in one_update(stream):
        if micro.last:
            trainer.scheduler.step(progress.updates)
        trainer.step.micro_batch(micro, trainer.log.loss_sum)
    if isinstance(stream, TrackedStream):
        stream.phase = "update"
    if trainer.step.update():
        progress.updates += 1
        trainer.ema.update()
    else:
        progress.skipped += 1
    trainer.step.zero_grad()
    trainer.timer.step()
    if progress.steps % trainer.log_every == 0:
        with suppress(Diverged):  # a profile makes more updates than the run was meant for: their time is what counts
            trainer.log.train(trainer.optimizer.param_groups[0]["lr"])


class Turn(NamedTuple):
    """What one of several looks at updates tells of the machine and of the wait for data."""

    step_s: float  # of an update as it is, unwatched
    all_cores_s: float  # of an update that computes with a thread for each core
    flops: float  # a second, of the device's matrix products in the format of the step
    phases: dict[str, float]  # seconds, whose sum is that of some updates


@dataclass(kw_only=True)
class Looked(Attribution):
    """The findings of several looks at updates, without the time in which these waited for a core."""

    turns: list[Turn]
    step_ms: float  # of an update as it is, unwatched
    phases: dict[str, float]  # ms of an update by phase; the device is synchronized after each
    utilization: dict[str, float]  # shares of an update's time
    read_ms: float | None  # of reading one micro-batch
    queued: float  # the share of the unwatched time in which the step waited for a core that other programs had
    threads: int  # that torch computes with
    threads_set_at: str  # file:line of the user's own that sets their number in the step; "": none
    cores: int  # that these threads may use; of an accelerator's host no more than they use

    @property
    def all_cores(self) -> intervals.Interval:
        """The time of an update with a thread for each core, divided by its time as it is."""
        return intervals.ratio([turn.all_cores_s for turn in self.turns], [turn.step_s for turn in self.turns])

    @property
    def waits_for_data(self) -> intervals.Interval:
        """The share of an update in which it waits for data, with its interval."""
        shares = [turn.phases.get(DATA, 0.0) / (sum(turn.phases.values()) or 1.0) for turn in self.turns]
        return intervals.around(self.phases.get(DATA, 0.0) / sum(self.phases.values()), shares)


def look(trainer: Trainer, stream: TrackedStream, profile_s: float) -> Looked:
    """Look at updates in turns: as they are, sampled, by their phases, and with each operation recorded.

    The machine's speed changes, so that each look is one of several, and the intervals are told by their spread.
    """
    on_cpu, block_s = trainer.device.type == "cpu", profile_s / LOOKS
    utilization = {} if on_cpu else device_shares(trainer, stream)
    busy = 1 - utilization.get(IDLE, 1.0)  # the share of the time in which an accelerator works
    helpers = not on_cpu or threading.active_count() > 1  # threads of the backward, or of the loader
    phases = _Phases(trainer, stream)
    small_size = sum(t.numel() for micro in one_update(stream) if micro.last for t in trees.leaves(micro.x)) // 16
    threads, set_at = threads_of(lambda: update(trainer, stream))
    cores = usable_cores() if on_cpu else threads
    plain, watched, counted, took = 0, 0, 0, Spent()
    samples: list[Samples] = []
    recorded: list[TimedOperation] = []
    looks: list[Attribution] = []
    turns: list[Turn] = []

    def block(once: Callable[[], None], clock: Clocks) -> tuple[int, Spent]:
        count = 0
        # On a busy machine it takes longer until as much of the run was seen.
        while not count or ((now := clock()).own < block_s and now.wall < MAX_SLOWER * block_s):
            once()
            count += 1
        synchronize(trainer.device)
        return count, clock()

    for _ in range(LOOKS):
        synchronize(trainer.device)
        updates, seconds = block(lambda: update(trainer, stream), thread_clock())
        plain, took = plain + updates, took + seconds
        step_s = all_cores_s = seconds.own / updates
        if threads < cores:
            with computing_with(cores):
                update(trainer, stream)  # the first one starts the threads
                updates, seconds = block(lambda: update(trainer, stream), thread_clock())
                all_cores_s = seconds.own / updates
        with sampled(lambda: stream.phase, update.__code__, helpers) as (clock, spent):
            seen, _ = block(lambda: update(trainer, stream), clock)
        counted += block(phases.update, thread_clock())[0]
        recorder = OperationRecorder(
            lambda: stream.phase, ThreadClock() if on_cpu else clock_for(trainer.device), update.__code__, small_size
        )
        with recorder.recording():
            update(trainer, stream)
        turns.append(Turn(step_s, all_cores_s, measured(trainer.device, trainer.log.mfu.number_format), phases.taken()))
        looks.append(attribute(spent, recorder.operations, 1, busy, seen))
        samples.append(spent)
        watched, recorded = watched + seen, recorded + recorder.operations
    found = attribute(together(samples), recorded, LOOKS, busy, watched)
    shares = [{line.place: line.share for line in look.lines} for look in looks]
    for line in found.lines:
        line.looks = tuple(share.get(line.place, 0.0) for share in shares)
    _count_host_reads(trainer, stream, found.lines)
    step_ms = 1e3 * took.own / plain
    of_phases = {name: sum(turn.phases.get(name, 0.0) for turn in turns) for turn in turns for name in turn.phases}
    return Looked(
        found.lines,
        found.rest,
        turns=turns,
        step_ms=step_ms,
        phases={name: 1e3 * seconds / counted for name, seconds in of_phases.items()},
        utilization=_cpu_shares(recorded, LOOKS * step_ms, found.rest.get(WAITING, 0.0)) if on_cpu else utilization,
        read_ms=1e3 * statistics.fmean(phases.read_s) if phases.read_s else None,
        queued=max(0.0, 1 - took.own / took.wall),
        threads=threads,
        threads_set_at=set_at,
        cores=cores,
    )


def reading_lines(trainer: Trainer, seconds: float) -> Samples:
    """Read batches in this process, and sample it: the loader's own processes cannot be watched."""
    with sampled(lambda: "data", reading_lines.__code__, threading.active_count() > 1) as (clock, spent):
        for request in trainer.requests():
            trainer.train_data(request)
            if clock().wall > seconds:
                break
    return spent


def _count_host_reads(trainer: Trainer, stream: TrackedStream, lines: list[CodeLine]) -> None:
    """Count how often in an update each user line makes the host wait for the device, or would on CUDA."""
    found: Counter[str] = Counter()

    def count(_: str) -> None:
        if stream.phase != "data":
            found[user_line(sys._getframe(1), update.__code__)] += 1

    with waiting_calls(count):
        for _ in range(UPDATES):
            update(trainer, stream)
    known = {line.place: line for line in lines}
    for place in filter(None, found):
        if place not in known:
            lines.append(known.setdefault(place, CodeLine(place)))
        known[place].host_reads = -(-found[place] // UPDATES)


END = "drivetrain: end"
IDLE = "the device is idle"
PROFILED = 5  # updates
SYNCHRONIZING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def _cpu_shares(operations: Iterable[TimedOperation], whole_ms: float, waiting: float) -> dict[str, float]:
    """The share of a CPU's time in operations, and between them, which is Python's and torch's dispatcher's."""
    computing = min(1.0, sum(o.ms + o.backward_ms for o in operations if o.phase != "data") / whole_ms)
    return {"in operations": computing, "between operations (Python, dispatch)": max(0.0, 1 - computing - waiting)}


def device_shares(trainer: Trainer, stream: TrackedStream) -> dict[str, float]:
    """Shares of an update's time: an accelerator's own of kernels and copies, and the host's that waits for it.

    Empty where the profiler sees nothing of the device.
    """
    silence_profiler()
    # The host, and the device where the profiler knows its type: CUDA, XPU; not MPS.
    of_device = getattr(ProfilerActivity, trainer.device.type.upper(), ProfilerActivity.CPU)
    with profile(activities=[*{ProfilerActivity.CPU, of_device}]) as profiler:
        began = time.perf_counter()
        for _ in range(PROFILED):
            update(trainer, stream)
        with record_function(END):
            synchronize(trainer.device)
        whole_us = 1e6 * (time.perf_counter() - began)
    return _device_shares(profiler.events() or [], whole_us)


def _device_shares(events: Iterable[FunctionEvent], whole_us: float) -> dict[str, float]:
    on_host = [e for e in events if e.device_type == DeviceType.CPU]
    # A named range of the host, such as torch's own of the optimizer, is repeated on the device, with the gaps in it.
    on_device = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    if not on_device:
        return {}
    copies = [e for e in on_device if e.name.startswith("Memcpy")]
    end = next(e.time_range.start for e in on_host if e.name == END)  # the profile's own synchronization comes after it
    waits = sum(e.time_range.end - e.time_range.start for e in on_host if e.name in SYNCHRONIZING and e.time_range.end < end)
    return {
        "the device computes": _union_us(e for e in on_device if not e.name.startswith("Memcpy")) / whole_us,
        "the device copies": _union_us(copies) / whole_us,
        IDLE: max(0.0, whole_us - _union_us(on_device)) / whole_us,
        "the host waits for the device": waits / whole_us,
    }


def _union_us(events: Iterable[FunctionEvent]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def threads_of(update: Callable[[], None]) -> tuple[int, str]:
    """The threads that torch computes with in an update, and file:line of the user's own that sets their number; "": none."""
    places: list[str] = []
    with threads_set_by(lambda _: places.append(user_line(sys._getframe(1)))):
        update()
    update()  # as it is: it may set the number itself
    return torch.get_num_threads(), next(filter(None, places), "")


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Within the context torch computes with so many threads, whatever an update sets."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with threads_set_by(lambda _: None):
        yield
    torch.set_num_threads(before)


MIN_READING = 0.1  # of an update's time spent waiting for data: then the lines are looked for that read it in other processes


@dataclass(kw_only=True)
class StepProfile(Looked):
    """The parts of a step's time, and what it is measured by."""

    evaluation_s: float
    saving_s: float | None  # of one checkpoint; None where the run saves none
    updates: int  # in an epoch
    run_updates: int  # in the whole run
    larger_batch: float | None  # samples a second with four times the micro-batch, relative to one
    bandwidth: float  # bytes a second, read and written by a copy
    step_flops: float  # of forward and backward of an update; 0 where torch cannot count them
    micro_batch: int
    device: str
    start_s: float  # until the run is built


def profile_step(trainer: Trainer, profile_s: float, asked: float | None = None) -> StepProfile:
    """Run updates of a built trainer, for `profile_s` seconds in each of several kinds of profile.

    It was `asked` for at this time.monotonic(), before the trainer was built.
    """
    start_s, run_updates = time.monotonic() - (asked or time.monotonic()), trainer.max_updates
    trainer.endless()
    trainer.model.train()
    trainer.callbacks.start()
    trainer.log.writers = [trainer.callbacks]
    stream = TrackedStream(trainer.read())
    for _ in range(trainer.timer.warmup + WARMUP_UPDATES):
        update(trainer, stream)
    found = look(trainer, stream, profile_s)
    if found.rest.get(WAITING, 0.0) > MIN_READING and not any(line.reads_data for line in found.lines):
        read = found.with_reading(reading_lines(trainer, profile_s))
        found.lines, found.rest = read.lines, read.rest
    batches = list(one_update(stream))
    samples = trees.length(batches[-1].x)
    return StepProfile(
        **vars(found),
        larger_batch=_larger_batch(trainer, batches[-1]),
        evaluation_s=_evaluation_s(trainer),
        saving_s=_saving_s(trainer),
        updates=trainer.batch.updates(trainer.batch.order.length, 0, trainer.drop_last),
        run_updates=run_updates,
        bandwidth=bandwidth(trainer.device),
        step_flops=len(batches) * samples * (trainer.log.mfu.model.per_sample or 0.0),
        micro_batch=samples,
        device=trainer.device.type,
        start_s=start_s,
    )


REST = "schedule, records and callbacks"
P = ParamSpec("P")
T = TypeVar("T")


class _Phases:
    """Times the phases of updates, and the rest of them. The device is synchronized after each phase."""

    def __init__(self, trainer: Trainer, stream: TrackedStream) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._clock, self._device = thread_clock(), trainer.device
        self.read_s: list[float] = []
        step = self._apart(trainer.step)
        timed: Any = copy(trainer)
        timed.ema = SimpleNamespace(update=self._timed("update", trainer.ema.update))
        timed.step = SimpleNamespace(
            micro_batch=step.micro_batch,
            update=self._timed("update", step.update),
            zero_grad=self._timed("update", step.zero_grad),
        )
        self.update = self._timed("", partial(update, timed, self._reads(stream)))

    def _apart(self, step: Any) -> Any:
        """The step with its phases told apart; one that is wrapped otherwise, such as by one graph, is a phase as it is."""
        if type(step) is CallbackStep:
            return dataclasses.replace(step, inner=self._apart(step.inner))
        if type(step) is UpdateStep:
            return dataclasses.replace(step, inner=self._apart(step.inner), waiting=[])
        if not isinstance(step, PlainStep):
            given = {name: getattr(step, name) for name in ("update", "zero_grad")}
            return SimpleNamespace(micro_batch=self._timed("step", step.micro_batch), **given)
        plain, backward = step.precision, self._timed("backward", step.precision.backward)
        parts = SimpleNamespace(
            forward=self._timed("forward", step.forward),
            loss=SimpleNamespace(step=self._timed("loss", step.loss.step)),
            precision=SimpleNamespace(autocast=plain.autocast, backward=backward, step=plain.step),
        )
        return dataclasses.replace(step, **vars(parts))

    def _timed(self, phase: str, call: Callable[P, T]) -> Callable[P, T]:
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            began = self._clock()
            result = call(*args, **kwargs)
            synchronize(self._device)
            self._spent[phase] += (self._clock() - began).own
            return result

        return run

    def _reads(self, stream: TrackedStream) -> Iterator[MicroBatch]:
        read = self._timed(DATA, lambda: next(stream))
        while True:
            micro = read()
            if micro.seconds is not None:
                self.read_s.append(micro.seconds)
            yield micro

    def taken(self) -> dict[str, float]:
        """Seconds of the updates since the last call by phase, whose sum is their time."""
        spent, self._spent = dict(self._spent), defaultdict(float)
        whole = spent.pop("")
        if "loss" in spent:  # which runs the forward
            spent["loss"] -= spent["forward"]
        return {**spent, REST: max(0.0, whole - sum(spent.values()))}


def _larger_batch(trainer: Trainer, micro: MicroBatch) -> float | None:
    """Samples a second of forward and backward with four times the micro-batch, relative to one: the median of pairs.

    None where four times the micro-batch does not fit.
    """

    step = trainer.step.with_forward(trainer.evaluator.forward)  # not compiled: a compiler would compile for the larger batch too
    loss_sum = torch.zeros((), device=trainer.device)

    def seconds(x: trees.Tree, y: trees.Tree) -> float:
        began = time.perf_counter()
        step.micro_batch(dataclasses.replace(micro, x=x, y=y), loss_sum)
        step.zero_grad()
        synchronize(trainer.device)
        return time.perf_counter() - began

    try:
        batches = [tuple(trees.concatenate([t] * times) for t in (micro.x, micro.y)) for times in (1, 4)]
        pairs = [[seconds(*batch) for batch in batches] for _ in range(1 + LOOKS)]
        return statistics.median(4 * one / four for one, four in pairs[1:])  # the first pair is the warm-up
    except (RuntimeError, TypeError):
        return None


def _evaluation_s(trainer: Trainer) -> float:
    """Seconds of one evaluation, extrapolated from its first batches."""
    world, sets = trainer.parallel.data_world, trainer.evaluator.sets[trainer.evaluator.set].values()
    batches = max(len(trainer.batch.evaluation(pipeline.source, world)) for pipeline in sets)
    trainer.evaluator.max_batches = min(batches, trainer.evaluator.max_batches or batches, 8)
    synchronize(trainer.device)
    return own_seconds(trainer.evaluator.metrics) * batches / max(1, trainer.evaluator.max_batches)


def _saving_s(trainer: Trainer) -> float | None:
    """Seconds of saving one checkpoint."""
    if not trainer.saving.active:
        return None
    synchronize(trainer.device)
    with tempfile.TemporaryDirectory(dir=trainer.run_dir) as folder:
        return own_seconds(lambda: checkpoint_io.save(Path(folder), 0, trainer.model.state_dict(), trainer.state()))
