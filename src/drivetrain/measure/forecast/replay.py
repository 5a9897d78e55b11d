"""The operations of a step on this machine: each is timed by itself, on tensors of its shapes, with what its kernel allocates.

A short look at the machine tells the rest: products, convolutions, copies, and what one operation costs the host. It is kept
in a file.
"""

from __future__ import annotations

import json
import platform
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_map

from drivetrain.core import limits
from drivetrain.core.device import synchronize
from drivetrain.core.files import write_json
from drivetrain.core.typed import fits
from drivetrain.core.user_state import user_state
from drivetrain.debug.profile import silence_profiler
from drivetrain.engine.flops import from_table, measured
from drivetrain.engine.rehearsal.fake_step import StepRecord
from drivetrain.engine.rehearsal.operation import Operation, Spec, is_spec
from drivetrain.engine.trainer import Trainer
from drivetrain.run import environment


class Figure(NamedTuple):
    """A value with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Figure:
        """A value that is counted."""
        return cls(value, value, value)

    @classmethod
    def within(cls, value: float, low: float, high: float) -> Figure:
        """A value with an interval that is given by factors of it."""
        return cls(value, value * low, value * high)

    def __add__(self, other: Figure) -> Figure:  # type: ignore[override]
        """The sum, with the sum of the intervals: the parts may be wrong together."""
        return Figure(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Figure:
        """The figure so many times."""
        return Figure(*(factor * each for each in self))

    def holds(self, value: float) -> bool:
        """True if a value lies in the interval."""
        return self.low <= value <= self.high


GIB, GB, TB = 2**30, 1e9, 1e12
# Eager kernels reach about 60 % of the peak in large matrix products, and less in convolutions and attention. Of the bandwidth
# they reach less than a copy does: kernels of normalisations read their inputs more than once.
EFFICIENCY = {
    "product": Figure(0.60, 0.40, 0.80),
    "convolution": Figure(0.40, 0.20, 0.65),
    "attention": Figure(0.40, 0.20, 0.65),
    "bandwidth": Figure(0.60, 0.40, 0.85),
}
KERNEL_S, HOST_S, VIEW_S = Figure(3e-6, 2e-6, 5e-6), Figure(7e-6, 4e-6, 12e-6), Figure(2e-6, 1e-6, 4e-6)
RESERVED, FRAGMENTATION = Figure(0.8 * GIB, 0.5 * GIB, 1.2 * GIB), Figure(1.05, 1.0, 1.12)
AS_FORECAST = Figure(1.0, 1.0, 1.0)
HERE = "here"
FORECAST_ONLY = "forecast, never measured here"


@dataclass(frozen=True)
class Device:
    """The limits of one device. Figures are shares of the peaks that operations reach, or seconds."""

    name: str
    memory: float  # bytes
    flops: Mapping[str, float]  # a second, by number format
    bandwidth: float  # bytes a second, of its memory
    link: float  # bytes a second that one device sends to others of its machine
    source: str
    asynchronous: bool = True  # the host queues work, and does not wait for it
    efficiency: Mapping[str, Figure] = field(default_factory=lambda: EFFICIENCY)
    kernel_s: Figure = KERNEL_S  # the shortest time of a kernel
    host_s: Figure = HOST_S  # for one operation on the host: Python, the dispatcher and the launch
    view_s: Figure = VIEW_S  # for an operation that moves nothing
    reserved: Figure = RESERVED  # the driver's context, and libraries' workspaces
    fragmentation: Figure = FRAGMENTATION  # what the caching allocator holds, as a factor of what is in use
    correction: Figure = AS_FORECAST  # of the time: what was measured, divided by what was forecast


# Memory and bandwidth are those of the makers' data sheets; FLOP/s are in engine/flops.py. A link is one direction's.
_TABLE: dict[str, tuple[str, float, float, float, str]] = {
    "b200": ("B200", 180 * GB, 8.0 * TB, 900 * GB, "data sheet of the HGX B200"),
    "h200": ("H200", 141 * GB, 4.8 * TB, 450 * GB, "data sheet of the H200 SXM"),
    "h100": ("H100", 80 * GB, 3.35 * TB, 450 * GB, "data sheet of the H100 SXM"),
    "h100-pcie": ("H100 PCIe", 80 * GB, 2.0 * TB, 64 * GB, "data sheet of the H100 PCIe"),
    "a100": ("A100", 80 * GB, 2.039 * TB, 300 * GB, "data sheet of the A100 SXM, 80 GB"),
    "a100-40gb": ("A100", 40 * GB, 1.555 * TB, 300 * GB, "data sheet of the A100 SXM, 40 GB"),
    "l40s": ("L40S", 48 * GB, 0.864 * TB, 32 * GB, "data sheet of the L40S"),
    "l4": ("L4", 24 * GB, 0.3 * TB, 32 * GB, "data sheet of the L4"),
    "5090": ("RTX 5090", 32 * GB, 1.792 * TB, 64 * GB, "whitepaper RTX Blackwell"),
    "4090": ("RTX 4090", 24 * GB, 1.008 * TB, 32 * GB, "whitepaper Ada GPU Architecture"),
    "3090": ("RTX 3090", 24 * GB, 0.936 * TB, 32 * GB, "whitepaper GA102"),
    "v100": ("V100 SXM2", 32 * GB, 0.9 * TB, 150 * GB, "data sheet of the V100 SXM2"),
    "t4": ("Tesla T4", 16 * GB, 0.32 * TB, 16 * GB, "data sheet of the T4"),
    "mi300x": ("MI300X", 192 * GB, 5.3 * TB, 448 * GB, "data sheet of the Instinct MI300X"),
}
NAMES = (HERE, *_TABLE)
FORMATS = ("float32", "tf32", "bfloat16", "float16")


def known(name: str) -> Device:
    """Return a device of the table."""
    torch_name, memory, bandwidth, link, source = _TABLE[name]
    flops = {number: 1e12 * tflops for number in FORMATS if (tflops := from_table(torch_name, number)) is not None}
    return Device(name, memory, flops, bandwidth, link, f"{source}: {FORECAST_ONLY}")


COMPUTE, BANDWIDTH, LAUNCH = "compute", "memory bandwidth", "launch"
FUSED_BYTES = Figure(0.5, 0.3, 0.7)  # of pointwise operations' traffic that a compiler's fused kernels keep
COMPILED_HOST = Figure(0.3, 0.15, 0.5)  # of the host's time for an operation, in a compiled forward and backward
RECORDED_HOST = Figure(0.03, 0.01, 0.1)  # where the step is replayed as one graph
# Where selective recomputation asks a policy for each operation, in Python (from the calibration's runs on a CPU).
ASKED_HOST = Figure(4.0, 2.5, 6.0)


class Compiled(NamedTuple):
    """The shares of the traffic of pointwise operations and of the host's time that remain after compiling, as factors."""

    traffic: Figure = Figure.exactly(1.0)
    host: Figure = Figure.exactly(1.0)


EAGER = Compiled()


class StepTime(NamedTuple):
    """The seconds of an update without reading and network, and the share of each limit in them."""

    seconds: Figure
    shares: dict[str, float]
    forward_s: float  # of all its micro-batches
    backward_s: float


def step_time(rows: Sequence[Row], device: Device, tf32: bool = False, compiled: Compiled = EAGER) -> StepTime:
    """Return the time of an update's operations on a device."""
    likely = [_takes(row, device, tf32, compiled, 0) for row in rows]
    sums = [sum(seconds for seconds, _ in likely)]
    sums += [sum(_takes(row, device, tf32, compiled, which)[0] for row in rows) for which in (1, 2)]
    host = [_host(rows, device, compiled, which) for which in range(3)]
    shares: Counter[str] = Counter()
    for seconds, limit in likely:
        shares[limit] += seconds  # type: ignore[assignment]
    if device.asynchronous:  # the host queues the next operations while the device works
        whole = [max(work, queued) for work, queued in zip(sums, host, strict=True)]
        if host[0] > sums[0]:
            shares = Counter({LAUNCH: 1})
    else:
        whole = [work + queued for work, queued in zip(sums, host, strict=True)]
        shares[LAUNCH] += host[0]  # type: ignore[assignment]
    scale = whole[0] / sums[0] if sums[0] else 1.0
    by_phase = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    for (one, _), row in zip(likely, rows, strict=True):
        by_phase[row.phase] += scale * one
    update_s = Figure(*(each * factor for each, factor in zip(whole, device.correction, strict=True)))
    every = sum(shares.values()) or 1.0
    return StepTime(
        update_s, {limit: share / every for limit, share in shares.items()}, by_phase["forward"], by_phase["backward"]
    )


def timed_share(rows: Sequence[Row], device: Device) -> float:
    """The share of the operations' time that was measured."""
    likely = [(row.seconds is not None, _takes(row, device, False, EAGER, 0)[0]) for row in rows]
    return sum(seconds for timed, seconds in likely if timed) / (sum(seconds for _, seconds in likely) or 1.0)


def _takes(row: Row, device: Device, tf32: bool, compiled: Compiled, which: int) -> tuple[float, str]:
    """The seconds of all calls of one operation, and what limits them; `which`: 0 likely, 1 at the least, 2 at the most."""
    if row.kind == "view":
        return 0.0, LAUNCH
    worst = (0, 2, 1)[which]  # the highest efficiency takes the least time
    pointwise = row.kind in ("pointwise", "update")
    nbytes = row.nbytes * (compiled.traffic[which] if row.kind == "pointwise" and row.phase != "update" else 1.0)
    moving = nbytes / (device.bandwidth * device.efficiency["bandwidth"][worst])
    peak = device.flops.get(number_format(row.dtype, tf32)) or device.flops["float32"]
    computing = 0.0 if pointwise else row.flops / (peak * device.efficiency[row.kind][worst])
    limit = COMPUTE if computing > moving else BANDWIDTH
    if row.seconds is not None:  # measured here
        return row.times * row.seconds, limit
    seconds = max(computing, moving)
    return row.times * max(seconds, device.kernel_s[which]), LAUNCH if device.kernel_s[which] > seconds else limit


def number_format(dtype: str, tf32: bool) -> str:
    """The format of a product's arithmetic, as the tables name it."""
    return "tf32" if dtype == "float32" and tf32 else dtype


def _host(rows: Iterable[Row], device: Device, compiled: Compiled, which: int) -> float:
    """The host's seconds. What was measured here has the dispatcher's time in it already, and Python's is added."""
    seconds = 0.0
    for row in rows:
        one = device.view_s[which] if row.kind == "view" else device.host_s[which]
        seconds += row.times * one * (compiled.host[which] if row.phase != "update" else 1.0)
    return seconds


def network_seconds(nbytes: float, device: Device, backward_s: float) -> Figure:
    """Time that ranks wait for each other: what does not fit behind the backward. At the least all of it does, at most none."""
    sending = nbytes / (device.link * 0.7)
    return Figure(max(0.0, sending - 0.7 * backward_s), 0.0 if sending < backward_s else sending - backward_s, sending)


ENOUGH_S, MOST_TIMES = 0.01, 20  # of repeating one operation
FIRST_SHARE = 0.5  # of the budget: for one call of each operation
MARK = "drivetrain: operation "
READS = 4  # micro-batches that are read, for the time of one
ASSUMED_FLOPS, ASSUMED_BANDWIDTH = 3e10, 5e9  # to put operations in order: those first that may take longest
FILLED = 0.5  # floating-point inputs: valid for every operation, and no denormal number


class Timed(NamedTuple):
    """The cost of one operation here: seconds, and bytes that its kernel allocates beside its results while it runs."""

    seconds: float
    workspace: int


class Row(NamedTuple):
    """An operation of an update, and how often it is made; without what only this process knows."""

    name: str
    kind: str
    dtype: str
    phase: str
    times: int
    flops: int
    nbytes: int
    seconds: float | None  # of one, measured here
    at_most: int  # bytes allocated while it runs, its kernel's own among them where that was measured


def rows(record: StepRecord, device: torch.device, budget_s: float, timed: dict[str, Timed]) -> list[Row]:
    """Return the operations of an update. Those that may take longest are timed here first, until the budget is spent.

    `timed` are those that were timed before; it gets the new ones.
    """
    if budget_s:
        roughly = {o: n * (o.flops / ASSUMED_FLOPS + o.nbytes / ASSUMED_BANDWIDTH) for o, n in record.operations.items()}
        real = {o.signature: o for o in sorted(roughly, key=lambda o: -roughly[o])}
        timed |= measure([o for o in real.values() if o.kind != "view" and o.signature not in timed], device, budget_s)
    return [_row(o, n, timed.get(o.signature), record.most_during.get(o.signature, 0)) for o, n in record.operations.items()]


def _row(operation: Operation, count: int, timed: Timed | None, now: int) -> Row:
    name = operation.call[0]._overloadpacket.__name__
    dtype = str(operation.dtype).removeprefix("torch.")
    seconds, workspace = timed or (None, 0)
    return Row(name, operation.kind, dtype, operation.phase, count, operation.flops, operation.nbytes, seconds, now + workspace)


def reading_seconds(trainer: Trainer) -> float:
    """The time in which this process reads and delivers one micro-batch: the shortest of some after the first, which prepares."""
    now, times = clock(trainer.device), []
    stream = trainer.read()
    with closing(stream):
        for _ in range(READS):
            began = now()
            if next(stream, None) is None:
                break
            times.append(now() - began)
    return min(times[1:] or times, default=0.0)


def measure(operations: Sequence[Operation], device: torch.device, budget_s: float) -> dict[str, Timed]:
    """Measure operations in this order until the budget is spent; by signature. What fails by itself is left out."""
    began = time.perf_counter()
    with torch.no_grad():
        workspaces = _workspaces(operations, device, began + FIRST_SHARE * budget_s)
        found = {}
        for operation in operations:
            if operation.signature in workspaces and time.perf_counter() < began + budget_s:
                seconds = _seconds(_call(operation, device), clock(device))
                found[operation.signature] = Timed(seconds, workspaces[operation.signature])
        return found


def clock(device: torch.device) -> Callable[[], float]:
    """With one thread on a CPU its processor time, to which other programs add little; else the time until all is done."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time

    def until_done() -> float:
        synchronize(device)
        return time.perf_counter()

    return until_done


def _seconds(call: Callable[[], object], now: Callable[[], float]) -> float:
    """The median of several calls; by the wall's clock the shortest, as other programs lengthen some of them."""
    times: list[float] = []
    enough = ENOUGH_S if now is time.thread_time else 5 * ENOUGH_S
    while not times or (sum(times) < enough and len(times) < MOST_TIMES):
        began = now()
        call()
        times.append(now() - began)
    return sorted(times)[len(times) // 2] if now is time.thread_time else min(times)


def _call(operation: Operation, device: torch.device) -> Callable[[], object]:
    """A function that makes the call, with real arguments."""
    function, args, kwargs = operation.call
    made, named = tree_map(lambda v: _tensor(v, device) if is_spec(v) else v, (args, kwargs), is_leaf=is_spec)
    return lambda: function(*made, **named)


def _tensor(spec: Spec, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    elements = made.untyped_storage().nbytes() // spec.dtype.itemsize
    made.as_strided((elements,), (1,)).fill_(FILLED if spec.dtype.is_floating_point or spec.dtype.is_complex else 0)
    return made


def _workspaces(operations: Sequence[Operation], device: torch.device, until: float) -> dict[str, int]:
    """Call each operation once, which also prepares its kernel; the bytes that it allocates beside its results."""
    if device.type != "cpu":
        return {o.signature: _on_device(o, device) for o in operations if time.perf_counter() < until}
    called: list[Operation] = []
    silence_profiler()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for operation in operations:
            if time.perf_counter() > until:
                break
            try:
                call = _call(operation, device)
                with record_function(MARK + str(len(called))):
                    call()
            except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
                continue
            called.append(operation)
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name().startswith(MARK)}
    return {o.signature: _beside(memory, *spans[MARK + str(n)], o.result_bytes) for n, o in enumerate(called)}


def _beside(memory: list[tuple[int, int]], start: int, end: int, results: int) -> int:
    """The most bytes that were allocated between two times, without the results."""
    now = most = 0
    for _, nbytes in memory[bisect_left(memory, (start, -(1 << 62))) : bisect_right(memory, (end, 1 << 62))]:
        now += nbytes
        most = max(most, now)
    return max(0, most - results)


def _on_device(operation: Operation, device: torch.device) -> int:
    call = _call(operation, device)
    call()
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    call()
    return max(0, torch.accelerator.max_memory_allocated(device) - before - operation.result_bytes)


VERSION = 2  # of what is measured: raised where older files no longer serve
LAYERS, WIDTH, TIMES = 32, 16, 15  # of the network whose operations are too small to take time themselves
COPIED = 2**27  # bytes, more than every cache
# The time of a step on this kind of device, divided by its forecast: median and range of the calibration's configurations
# (`python -m bench.forecast --pool calibration`), which are not those that the forecast is tested on.
CORRECTION = {"cpu": Figure(1.08, 0.63, 1.68)}


def state_file() -> Path:
    """The file of what was measured: below $XDG_STATE_HOME, else ~/.local/state."""
    return user_state() / "forecast.json"


def this_device(device: torch.device, formats: tuple[str, ...]) -> Device:
    """Return this machine's device, as it was measured now or before with the same software and threads."""
    software = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    key = f"{VERSION} {environment.device_name(device)} {platform.node()} {software}"
    known = _read()
    found = known.get(key, {})
    missing = {name: measure for name, measure in _measurements(device, formats).items() if name not in found}
    for name, measure in missing.items():
        found[name] = measure()
    if missing:
        with suppress(OSError):  # it is measured again the next time
            state_file().parent.mkdir(parents=True, exist_ok=True)
            write_json(state_file(), {**known, key: found})
    return _described(device, found)


def _measurements(device: torch.device, formats: tuple[str, ...]) -> dict[str, Callable[[], float]]:
    flops = {f"flops {name}": lambda name=name: measured(device, name) for name in ("float32", *formats)}
    return {
        **flops,
        "convolution": lambda: _convolution_flops(device) / measured(device, "float32"),
        "bandwidth": lambda: _bandwidth(device),
        "host": lambda: _host_seconds(device),
    }


def _described(device: torch.device, found: dict[str, float]) -> Device:
    on_cpu = device.type == "cpu"
    memory = limits.memory_bytes() if on_cpu else torch.get_device_module(device).get_device_properties(device).total_memory
    convolution = max(0.05, min(1.0, found["convolution"]))
    efficiency = {
        "product": Figure(0.7, 0.4, 1.0),
        "convolution": Figure(convolution, convolution / 2, min(1.0, 1.5 * convolution)),
        "attention": Figure(0.4, 0.2, 0.8),
        "bandwidth": Figure(0.8, 0.5, 1.5),  # caches: some of it does not go to memory
    }
    host = found["host"]
    return Device(
        HERE, float(memory), {k.partition(" ")[2]: v for k, v in found.items() if k.startswith("flops ")}, found["bandwidth"],
        link=1e9 if on_cpu else 32e9, source=f"{environment.device_name(device)}, measured", asynchronous=not on_cpu,
        efficiency=efficiency, kernel_s=Figure(0.2 * host, 0.1 * host, 0.4 * host), host_s=Figure.within(host, 0.6, 1.5),
        view_s=Figure.within(0.3 * host, 0.5, 1.7), correction=CORRECTION.get(device.type, Figure(1.0, 0.6, 1.6)),
        **({"reserved": Figure.exactly(0.0), "fragmentation": Figure.exactly(1.0)} if on_cpu else {}),
    )  # fmt: skip


def _convolution_flops(device: torch.device) -> float:
    x, weight = torch.full((8, 64, 28, 28), 0.5, device=device), torch.full((64, 64, 3, 3), 0.5, device=device)
    return 2 * 8 * 28 * 28 * 64 * 64 * 9 / _best(lambda: torch.conv2d(x, weight, padding=1), device)


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _best(lambda: target.copy_(source), device)


def _host_seconds(device: torch.device) -> float:
    """The host's time for one operation of a step beside the operation itself: modules, autograd and Python."""
    layers = [m for _ in range(LAYERS) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.GELU())]
    network = torch.nn.Sequential(*layers).to(device)
    x = torch.ones(2, WIDTH, device=device)

    def step() -> None:
        network(x).sum().backward()
        for p in network.parameters():
            p.grad = None

    def alone() -> None:
        for _ in range(LAYERS):
            y = torch.addmm(bias, x, weight)
            y = torch.nn.functional.gelu(torch.layer_norm(y, (WIDTH,), bias, bias))
            torch.mm(x, weight), torch.mm(x.t(), x), x.sum(0)

    weight, bias = torch.ones(WIDTH, WIDTH, device=device), torch.ones(WIDTH, device=device)
    with torch.no_grad():
        kernels = _best(alone, device)
    return max(1e-6, (_best(step, device) - kernels) / (LAYERS * 8))


def _best(work: Callable[[], object], device: torch.device) -> float:
    """The seconds of the fastest of several calls: other programs may disturb some."""
    now, taken = clock(device), []
    work()
    for _ in range(TIMES):
        began = now()
        work()
        taken.append(now() - began)
    return max(1e-9, min(taken))


def _read() -> dict[str, dict[str, float]]:
    try:
        found = json.loads(state_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if fits(found, dict[str, dict[str, float]]) else {}
