"""Samples what a thread does: a timer interrupts it at random instants, and the line that it is at then is counted."""

from __future__ import annotations

import dis
import linecache
import os
import random
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.core import process
from drivetrain.core.device import Clock, Mark
from drivetrain.measure import intervals
from drivetrain.measure.intervals import Interval
from drivetrain.precision.base import backpropagate

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
        positions = list(self.code.co_positions())
        at = self.instruction // 2
        return (positions[at][0] if 0 <= at < len(positions) else None) or self.code.co_firstlineno

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
            return Found(Site(code, frame.f_lasti), in_layer) if _called_by(frame, root) else Found()
        if code in _BACKWARD:
            return Found(in_backward=True)
        in_layer = in_layer or code is _MODULE_CALL
        frame = frame.f_back
    return Found()


def _called_by(frame: FrameType | None, root: CodeType | None) -> bool:
    while frame is not None and root is not None and frame.f_code is not root:
        frame = frame.f_back
    return frame is not None


def user_line(frame: FrameType | None, root: CodeType | None = None) -> str:
    """file:line of the innermost frame that is not in Python's library, torch, an installed package or drivetrain; "": none."""
    site = find(frame, root).site
    return site.place if site is not None else ""


SAMPLE_S = 0.001  # between two instants, on average
LOOK_S = 0.002  # between two looks at the other threads, on average
SWITCH_S = 1e-4  # within which a thread that runs Python code lets another look at it; else that waits until torch is called


class Spent(NamedTuple):
    """Seconds at one place, without those in which the thread waited for a core that other work had."""

    busy: float = 0.0  # on a core
    waits: float = 0.0  # in which it had nothing to do

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        return Spent(self.busy + other.busy, self.waits + other.waits)

    @property
    def own(self) -> float:
        """All of them."""
        return self.busy + self.waits


class Times(NamedTuple):
    """Clocks of a thread, in seconds."""

    wall: float
    own: float  # of the wall, less those in which the thread waited for a core that other work had
    busy: float  # the thread was on a core

    def __sub__(self, other: Times) -> Times:
        return Times(self.wall - other.wall, self.own - other.own, self.busy - other.busy)


class Sampler:
    """Samples the calling thread's stack while `watching`.

    The instants do not depend on what the thread does, so a line gets as many of them as its share of the time. Only Python
    code can be interrupted: the instants that fall into a call of C, such as an operation of torch, are counted when it
    returns, at the line that called it. The time of counting is taken out. What threads do that work for this one, such as
    those of the loader, another thread looks at: only where there are such `helpers`, as it takes turns with this one.
    """

    def __init__(self, phase: Callable[[], str], root: CodeType, helpers: bool = False) -> None:
        self.phase, self.root, self.helpers = phase, root, helpers
        self.spent: Samples = {}

    @contextmanager
    def watching(self) -> Iterator[Callable[[], float]]:
        """Sample until the block ends. Yield a clock of the thread's seconds, less those in which it waited for a core."""
        clock = thread_clock()
        began = clock()
        spent = _Instants(clock, lambda frame: (self.phase(), find(frame, self.root)))
        looks: defaultdict[tuple[str, Found], Counter[Found]] = defaultdict(Counter)
        with ExitStack() as watchers:
            watchers.enter_context(_interrupted(spent))
            if self.helpers:
                watchers.enter_context(_looked_at(self.phase, self.root, looks))
            yield lambda: (clock() - began).own
        self.spent = together([self.spent, *({place: found} for place, found in _divided(spent.spent, looks))])


class _Instants:
    """Counts random instants, and the seconds that they stand for, by what the thread does then."""

    def __init__(self, clock: Callable[[], Times], place: Callable[[FrameType | None], tuple[str, Found]]) -> None:
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


def _divided(
    spent: dict[tuple[str, Found], Spent], looks: dict[tuple[str, Found], Counter[Found]]
) -> Iterator[tuple[tuple[str, Found], Spent]]:
    """Divide the time in which the thread waited for others by what was seen of these."""
    for place, seconds in spent.items():
        seen = looks.get(place) or Counter({place[1]: 1})
        for found, count in seen.items():
            part = count / seen.total()
            yield (place[0], found), Spent(part * seconds.busy, part * seconds.waits)


def thread_clock() -> Callable[[], Times]:
    """Return the clocks of the calling thread. Only Linux tells how long it waited for a core: elsewhere that is in `own`."""
    statistics = f"/proc/self/task/{threading.get_native_id()}/schedstat"
    if not os.path.exists(statistics):
        return lambda: Times(now := time.perf_counter(), now, time.thread_time())

    def clock() -> Times:
        file = os.open(statistics, os.O_RDONLY)
        try:
            queued = int(os.read(file, 128).split()[1]) / 1e9
        finally:
            os.close(file)
        now = time.perf_counter()
        return Times(now, now - queued, time.thread_time())

    return clock


def own_seconds(work: Callable[[], object]) -> float:
    """The seconds that it takes, less those in which this thread waits for a core that other work has."""
    clock = thread_clock()
    began = clock()
    work()
    return (clock() - began).own


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
        """True if the model's own layers need it."""
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
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_node: dict[int, Operation] = {}
        self._marks: list[tuple[Operation, bool, Mark, Mark]] = []
        self._visited: set[int] = set()
        self._next_node = _next_node()
        self._last: Operation | None = None  # whose backward ran last

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

    def _operation(self, func: OpOverload[..., object], args: tuple[object, ...]) -> tuple[Operation | None, bool]:
        """Return the operation that the time belongs to, and whether this is its backward."""
        found = find(sys._getframe(2), self.root)
        node = torch._C._current_autograd_node()
        if node is not None and found.site is None:
            return self._forward_of(node), True
        name = func._schema.name.removeprefix("aten::")
        nodes = range(self._next_node, _next_node())
        trains = bool(nodes) and (name.startswith(_OF_LAYERS) or _has_weights(args))  # a layer's mathematics without a module
        layer = found.in_layer or found.site is None or trains
        operation = Operation(name, found, self.phase(), layer, False, False, False, nodes)
        operation.frozen = not nodes and not _has_weights(args)
        self._of_node.update(dict.fromkeys(nodes, operation))
        self._next_node = max(nodes.stop, self._next_node)
        self.operations.append(operation)
        return operation, False

    def _forward_of(self, node: Node) -> Operation | None:
        """Return the operation whose backward a node is; that of the last one, where a node only adds up gradients."""
        number = node._sequence_nr()
        if number not in self._visited:
            self._visit(node)
        self._last = self._of_node.get(number, self._last)
        return self._last

    def _visit(self, node: Node) -> None:
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


class ThreadClock(Clock):
    """The thread's time on a core: what else a busy machine does is no operation's."""

    mark = staticmethod(time.thread_time)


def _next_node() -> int:
    """Return the number of the next node that this thread adds to a graph."""
    return torch._C._autograd._get_sequence_nr()


def _has_weights(args: tuple[object, ...]) -> bool:
    return any(isinstance(a, torch.nn.Parameter) and a.requires_grad for a in args)


def _describe(operation: Operation, out: object, small_size: int) -> None:
    if not isinstance(out, torch.Tensor):
        out = next((o for o in out if isinstance(o, torch.Tensor)), None) if isinstance(out, tuple | list) else None
    if out is not None:
        operation.wide = out.dtype in (torch.float64, torch.complex128)
        operation.small = out.numel() <= small_size
        operation.creates = operation.name in FACTORIES and out.device.type == "cpu"


MAX_OVERHEAD_MS = 0.01  # of one operation, for the engine of the backward and for recording it
WAITING = "waiting for data"
Samples = Mapping[tuple[str, Found], Spent]


def together(several: Iterable[Samples]) -> Samples:
    """Add up samples."""
    total: defaultdict[tuple[str, Found], Spent] = defaultdict(Spent)
    for samples in several:
        for place, spent in samples.items():
            total[place] += spent
    return total


@dataclass
class Line:
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
    def interval(self) -> Interval:
        """`share` and its 95 % interval, by its spread over the looks; without these it has no width."""
        return intervals.around(self.share, self.looks)

    @property
    def function(self) -> str:
        """`function in file`."""
        file, _, function = self.place.rpartition(" in ")
        return f"{function} in {file.rpartition(':')[0]}"


@dataclass
class Attribution:
    """A step's time, by lines; the shares of all lines and of the rest add up to 1."""

    lines: list[Line]  # the one with the largest share first
    rest: dict[str, float]  # by what it is, of time that no line of the user's called

    def with_reading(self, samples: Samples) -> Attribution:
        """Divide the waiting for data by samples of reading that was done elsewhere."""
        waiting = self.rest.get(WAITING, 0.0)
        lines = [replace(line, share=line.share * waiting, reads_data=True) for line in attribute(samples, [], 1).lines]
        return Attribution(lines + self.lines, {**self.rest, WAITING: waiting - sum(line.share for line in lines)})


def attribute(
    samples: Samples, operations: Iterable[Operation], updates: int, busy: float = 0.0, watched: int | None = None
) -> Attribution:
    """Attribute a step's time. `operations` are those of several `updates`; `watched` updates were sampled.

    `busy` is the share of the time in which an accelerator works: that is divided by the operations' times on the
    device, and only the rest, in which the device waits for the host, by what the host does. A CPU's is 0.
    """
    operations = [o for o in operations if o.phase != "data"]
    calls: defaultdict[Site | None, list[Operation]] = defaultdict(list)
    for operation in operations:
        calls[operation.found.site].append(operation)
    lines: dict[str, Line] = {}
    line_of: dict[Site | None, Line] = {}
    for site in dict.fromkeys([*calls, *(found.site for _, found in samples)]):
        if site is not None:
            line_of[site] = lines.setdefault(site.place, Line(site.place, site.text))
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
            rest[REST[phase]] += own
    parts = _of_backward(operations, 1e3 * backward_s / watched * updates if watched else None)
    device_ms = sum(o.ms + o.backward_ms for o in operations) or 1.0
    for operation, part in zip(operations, parts, strict=True):
        backward = of_host * part * backward_s / total + busy * operation.backward_ms / device_ms
        both = busy * operation.ms / device_ms + backward
        if (known := line_of.get(operation.found.site)) is None:
            rest[REST[operation.phase]] += both
        elif operation.needed:
            known.layers += both
        else:
            known.share, known.backward = known.share + both, known.backward + backward
    if not any(parts) and backward_s:
        rest["the backward"] = of_host * backward_s / total
    made: defaultdict[str, list[Operation]] = defaultdict(list)
    for site, line in line_of.items():
        made[line.place] += calls[site]
    described = [_described(line, made[at], updates, spent[at], reading[at]) for at, line in lines.items()]
    return Attribution(sorted(described, key=lambda line: (-line.share, -line.operations)), dict(rest))


def _described(line: Line, operations: Sequence[Operation], updates: int, spent: Spent, reading: float) -> Line:
    """The line with what is known of its operations, and of its seconds, of which some are spent on `reading`."""
    names, created = Counter[str](), Counter[str]()
    for o in operations:
        names[o.name] += o.ms + o.backward_ms  # type: ignore[assignment]
        if o.creates:
            created[o.name] += o.ms / updates  # type: ignore[assignment]

    def part(chosen: Iterable[Operation]) -> float:
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


REST = {"data": WAITING, "micro_batch": "model and loss", "update": "the update"}


def _of_backward(operations: Sequence[Operation], backward_ms: float | None) -> list[float]:
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


def _needed(operations: Iterable[Operation]) -> float:
    """The part of a call's time that the model's layers need: that of their operations among its own."""
    total = sum(o.ms for o in operations)
    return sum(o.ms for o in operations if o.needed) / total if total else 0.0
