"""The operations of a step on a device: each takes as long as it was timed here, or as its arithmetic or its traffic takes.

A short measurement on this machine gives the limits of its device: products, convolutions, copies, and the host's cost of an
operation.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_map

from drivetrain.core.machine import guards
from drivetrain.core.machine.device import synchronize
from drivetrain.debug.profile import silence_profiler
from drivetrain.engine import rehearsal
from drivetrain.engine.flops import from_table, measured
from drivetrain.engine.trainer import Trainer
from drivetrain.run import environment


class Uncertain(NamedTuple):
    """A value with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> Uncertain:
        """A value that is counted."""
        return cls(value, value, value)

    def __add__(self, other: Uncertain) -> Uncertain:  # type: ignore[override]
        """The sum, with the sum of the intervals: the parts may be wrong together."""
        return Uncertain(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float | Uncertain) -> Uncertain:
        """The figure times a factor."""
        factors = factor if isinstance(factor, Uncertain) else (factor, factor, factor)
        return Uncertain(*(a * b for a, b in zip(self, factors, strict=True)))

    def at_least(self, other: Uncertain) -> Uncertain:
        """The larger one of each of the two figures' values."""
        return Uncertain(*map(max, self, other))


NOTHING, ONE = Uncertain.exactly(0.0), Uncertain.exactly(1.0)
MIB, GIB, GB, TB = 2**20, 2**30, 1e9, 1e12
# Eager kernels reach about 60 % of the peak in large matrix products, and less in convolutions and attention. Of the bandwidth
# they reach less than a copy does: kernels of normalisations read their inputs more than once.
EFFICIENCY = {
    "product": Uncertain(0.60, 0.40, 0.80),
    "convolution": Uncertain(0.40, 0.20, 0.65),
    "attention": Uncertain(0.40, 0.20, 0.65),
    "bandwidth": Uncertain(0.60, 0.40, 0.85),
}
KERNEL_S, HOST_S, VIEW_S = Uncertain(3e-6, 2e-6, 5e-6), Uncertain(7e-6, 4e-6, 12e-6), Uncertain(2e-6, 1e-6, 4e-6)
# Within the allocator's peak: cuBLAS keeps 32 MiB from Hopper on (8 before) for each of the two threads that call it.
WORKSPACES = Uncertain(64 * MIB, 8 * MIB, 96 * MIB)
RESERVED, FRAGMENTATION = Uncertain(0.8 * GIB, 0.5 * GIB, 1.2 * GIB), Uncertain(1.05, 1.0, 1.12)
HERE = "here"
FORECAST_ONLY = "forecast, never measured here"


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of one device. Figures are shares of the peaks that operations reach, or seconds."""

    name: str
    memory: float  # bytes
    flops: Mapping[str, float]  # a second, by number format
    bandwidth: float  # bytes a second, of its memory
    link: float  # bytes a second that one device sends to others of its machine
    source: str
    asynchronous: bool = True  # the host queues work, and does not wait for it
    efficiency: Mapping[str, Uncertain] = field(default_factory=lambda: EFFICIENCY)
    kernel_s: Uncertain = KERNEL_S  # the shortest time of a kernel
    host_s: Uncertain = HOST_S  # for one operation on the host: Python, the dispatcher and the launch
    view_s: Uncertain = VIEW_S  # for an operation that moves nothing
    reserved: Uncertain = RESERVED  # outside the allocator: the driver's context and libraries
    workspaces: Uncertain = WORKSPACES
    fragmentation: Uncertain = FRAGMENTATION  # what the caching allocator holds, as a factor of what is in use
    correction: Uncertain = ONE  # of the time: what was measured, divided by what was forecast


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
# Seen: an eager update that launches bound took 2.0 ms (bench/results/gpu-speed-nvidia-h200.json, mlp, ours none): divided by its
# operations as they are counted here; one may be several launches.
SEEN_HOST_S = {"h200": Uncertain(22e-6, 16e-6, 30e-6)}
FORMATS = ("float32", "tf32", "bfloat16", "float16")


def known(name: str) -> DeviceLimits:
    """Return a device of the table."""
    torch_name, memory, bandwidth, link, source = _TABLE[name]
    flops = {number: 1e12 * tflops for number in FORMATS if (tflops := from_table(torch_name, number)) is not None}
    limits = DeviceLimits(name, memory, flops, bandwidth, link, f"{source}: {FORECAST_ONLY}")
    host = SEEN_HOST_S.get(name, HOST_S)
    return replace(limits, host_s=host, view_s=host.times(VIEW_S.value / HOST_S.value))


def host_note(name: str) -> str:
    """The basis of the launch time on a device of the table."""
    kind, host = "as seen on one machine" if name in SEEN_HOST_S else "assumed, not seen", SEEN_HOST_S.get(name, HOST_S)
    return f"the host takes {1e6 * host.low:.0f} to {1e6 * host.high:.0f} µs for an operation, {kind}: another host differs"


COMPUTE, BANDWIDTH, LAUNCH = "compute", "memory bandwidth", "launch"
FUSED_BYTES = Uncertain(0.5, 0.3, 0.7)  # of pointwise operations' traffic that a compiler's fused kernels keep
COMPILED_HOST = Uncertain(0.3, 0.15, 0.5)  # of the host's time for an operation, in a compiled forward and backward
RECORDED_HOST = Uncertain(0.03, 0.01, 0.1)  # where the step is replayed as one graph
# Where selective recomputation asks a policy for each operation, in Python (from the calibration's runs on a CPU).
ASKED_HOST = Uncertain(4.0, 2.5, 6.0)


class CompiledShares(NamedTuple):
    """The shares of the traffic of pointwise operations and of the host's time that remain after compiling, as factors."""

    traffic: Uncertain = ONE
    host: Uncertain = ONE


EAGER = CompiledShares()


class Timed(NamedTuple):
    """The cost of one operation here: seconds, and the temporary bytes of its kernel, without its results."""

    seconds: float
    workspace: int


class StepTime(NamedTuple):
    """The seconds of an update without reading and network, and the share of each limit in them."""

    seconds: Uncertain
    shares: dict[str, float]
    forward_s: float  # of all its micro-batches
    backward_s: float
    timed_share: float  # of the operations' time, that was measured; the rest is the roofline's


def step_time(
    operations: Mapping[rehearsal.Operation, int],
    timed: Mapping[str, Timed],
    device: DeviceLimits,
    tf32: Collection[str] = (),
    compiled: CompiledShares = EAGER,
) -> StepTime:
    """Return the time of an update's operations on a device; `timed` has those measured here, by their signatures.

    Operations of the kinds in `tf32` compute float32 in TensorFloat-32.
    """
    work, host, measured = NOTHING, NOTHING, 0.0
    limits: defaultdict[str, float] = defaultdict(float)
    phases: defaultdict[str, float] = defaultdict(float)
    for operation, times in operations.items():
        one, limit = _takes(operation, timed.get(operation.signature), device, tf32, compiled)
        seconds = one.times(times)
        work += seconds
        limits[limit] += seconds.value
        phases[operation.phase] += seconds.value
        measured += seconds.value if operation.signature in timed else 0.0
        # Times measured here already include the dispatcher's, and Python's is added.
        queued = device.view_s if operation.kind == "view" else device.host_s
        host += queued.times(times).times(compiled.host if operation.phase != "update" else ONE)
    whole = work.at_least(host) if device.asynchronous else work + host  # the host queues operations while the device works
    if not device.asynchronous:
        limits[LAUNCH] += host.value
    elif host.value > work.value:
        limits = defaultdict(float, {LAUNCH: 1.0})
    every, most = sum(limits.values()) or 1.0, work.value or 1.0
    forward_s, backward_s = (whole.value / most * phases[phase] for phase in ("forward", "backward"))
    shares = {limit: share / every for limit, share in limits.items()}
    return StepTime(whole.times(device.correction), shares, forward_s, backward_s, measured / most)


def _takes(
    operation: rehearsal.Operation, timed: Timed | None, device: DeviceLimits, tf32: Collection[str], compiled: CompiledShares
) -> tuple[Uncertain, str]:
    """The seconds of one call of an operation, and what limits them."""
    if operation.kind == "view":
        return NOTHING, LAUNCH
    moving = _at(operation.nbytes, device.bandwidth, device.efficiency["bandwidth"])
    if operation.kind == "pointwise" and operation.phase != "update":
        moving = moving.times(compiled.traffic)
    computing = NOTHING
    if operation.kind not in ("pointwise", "update"):
        dtype = str(operation.dtype).removeprefix("torch.")
        number = "tf32" if dtype == "float32" and operation.kind in tf32 else dtype
        computing = _at(operation.flops, device.flops.get(number) or device.flops["float32"], device.efficiency[operation.kind])
    limit = COMPUTE if computing.value > moving.value else BANDWIDTH
    if timed is not None:
        return Uncertain.exactly(timed.seconds), limit
    seconds = computing.at_least(moving)
    return seconds.at_least(device.kernel_s), LAUNCH if device.kernel_s.value > seconds.value else limit


def _at(amount: float, rate: float, efficiency: Uncertain) -> Uncertain:
    """The seconds of an amount at a share of a rate: the highest efficiency takes the least time."""
    return Uncertain(*(amount / (rate * share) for share in (efficiency.value, efficiency.high, efficiency.low)))


def network_seconds(nbytes: float, device: DeviceLimits, backward_s: float) -> Uncertain:
    """Time that ranks wait for each other: what does not fit behind the backward. At the least all of it does, at most none."""
    sending = nbytes / (device.link * 0.7)
    return Uncertain(max(0.0, sending - 0.7 * backward_s), 0.0 if sending < backward_s else sending - backward_s, sending)


ENOUGH_S, MOST_TIMES = 0.01, 20  # of repeating one operation
FIRST_SHARE = 0.5  # of the budget: for one call of each operation
MARK = "drivetrain: operation "
READS = 4  # micro-batches that are read, for the time of one
ASSUMED_FLOPS, ASSUMED_BANDWIDTH = 3e10, 5e9  # to put operations in order: those first that may take longest
FILLED = 0.5  # floating-point inputs: valid for every operation, and no denormal number


def time_operations(
    operations: Mapping[rehearsal.Operation, int], device: torch.device, budget_s: float, timed: dict[str, Timed]
) -> None:
    """Time operations of an update here, those that may take longest first, until the budget is spent; `timed` gets the new ones.

    What fails by itself is left out.
    """
    roughly = {o: n * (o.flops / ASSUMED_FLOPS + o.nbytes / ASSUMED_BANDWIDTH) for o, n in operations.items()}
    ordered = {o.signature: o for o in sorted(roughly, key=lambda o: -roughly[o]) if o.kind != "view"}
    new, began = [o for o in ordered.values() if o.signature not in timed], time.perf_counter()
    with torch.no_grad():
        workspaces = _workspaces(new, device, began + FIRST_SHARE * budget_s)
        for operation in new:
            if operation.signature in workspaces and time.perf_counter() < began + budget_s:
                timed[operation.signature] = Timed(seconds_of(_call(operation, device), device), workspaces[operation.signature])


def reading_seconds(trainer: Trainer) -> float:
    """The time in which this process reads and delivers one micro-batch: the shortest of some after the first, which prepares."""
    now, times = clock(trainer.device), []
    with closing(trainer.read()) as stream:
        began = now()
        for _ in islice(stream, READS):
            times.append(now() - began)
            began = now()
    return min(times[1:] or times, default=0.0)


def clock(device: torch.device) -> Callable[[], float]:
    """With one thread on a CPU its processor time, to which other programs add little; else the time until all is done."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time

    def until_done() -> float:
        synchronize(device)
        return time.perf_counter()

    return until_done


def seconds_of(call: Callable[[], object], device: torch.device, enough_s: float = 0.0) -> float:
    """The median of several calls; by the wall's clock the shortest, as other programs lengthen some of them."""
    times: list[float] = []
    now = clock(device)
    enough_s = enough_s or (ENOUGH_S if now is time.thread_time else 5 * ENOUGH_S)
    while not times or (sum(times) < enough_s and len(times) < MOST_TIMES):
        began = now()
        call()
        times.append(now() - began)
    return max(1e-9, sorted(times)[len(times) // 2] if now is time.thread_time else min(times))


def _call(operation: rehearsal.Operation, device: torch.device) -> Callable[[], object]:
    """A function that makes the call, with real arguments."""
    function, args, kwargs = operation.call
    made, named = tree_map(lambda value: _tensor(value, device) if isinstance(value, rehearsal.Spec) else value, (args, kwargs))
    return lambda: function(*made, **named)


def _tensor(spec: rehearsal.Spec, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    elements = made.untyped_storage().nbytes() // spec.dtype.itemsize
    made.as_strided((elements,), (1,)).fill_(FILLED if spec.dtype.is_floating_point or spec.dtype.is_complex else 0)
    return made


def _workspaces(operations: Sequence[rehearsal.Operation], device: torch.device, until: float) -> dict[str, int]:
    """Call each operation once, which also prepares its kernel; return its temporary bytes, without its results."""
    if device.type != "cpu":
        return {o.signature: _on_device(o, device) for o in operations if time.perf_counter() < until}
    most: dict[str, int] = {}
    silence_profiler()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for number, operation in enumerate(operations):
            if time.perf_counter() > until:
                break
            with suppress(RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
                call = _call(operation, device)
                with record_function(f"{MARK}{number}"):
                    call()
                most[operation.signature] = 0
    results: Any = profiler.profiler
    now = end = 0
    for event in sorted(results.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name().startswith(MARK):
            running = operations[int(event.name().removeprefix(MARK))]
            now, end = -running.result_bytes, event.end_ns()
        elif event.name() == "[memory]" and event.start_ns() <= end and running.signature in most:
            now += event.nbytes()
            most[running.signature] = max(now, most[running.signature])
    return most


def _on_device(operation: rehearsal.Operation, device: torch.device) -> int:
    call = _call(operation, device)
    call()
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    call()
    return max(0, torch.accelerator.max_memory_allocated(device) - before - operation.result_bytes)


LAYERS, WIDTH = 32, 16  # of the network whose operations are too small to take time themselves
COPIED, LOOK_S = 2**27, 0.3  # bytes, more than every cache; seconds of each part of the look; its first call prepares
# The time of a step on this kind of device, divided by its forecast: median and range of the calibration's configurations
# (`python -m bench.forecast --pool calibration`), which are not those that the forecast is tested on.
CORRECTION = {"cpu": Uncertain(1.08, 0.63, 1.68)}


def this_device(device: torch.device, formats: tuple[str, ...]) -> DeviceLimits:
    """Return this machine's device, as this process measures it once."""
    on_cpu = device.type == "cpu"
    memory = guards.memory_bytes() if on_cpu else torch.get_device_module(device).get_device_properties(device).total_memory
    flops = {name: _products(device, name) for name in ("float32", *formats)}
    convolution = max(0.05, min(1.0, _convolution_flops(device) / flops["float32"]))
    efficiency = {
        "product": Uncertain(0.7, 0.4, 1.0),
        "convolution": Uncertain(convolution, convolution / 2, min(1.0, 1.5 * convolution)),
        "attention": Uncertain(0.4, 0.2, 0.8),
        "bandwidth": Uncertain(0.8, 0.5, 1.5),  # caches: some of it does not go to memory
    }
    host = _host_seconds(device)
    return DeviceLimits(
        HERE, float(memory), flops, bandwidth(device), link=1e9 if on_cpu else 32e9,
        source=f"{environment.device_name(device)}, measured", asynchronous=not on_cpu, efficiency=efficiency,
        kernel_s=Uncertain(0.2 * host, 0.1 * host, 0.4 * host), host_s=Uncertain(host, 0.6 * host, 1.5 * host),
        view_s=Uncertain(0.3 * host, 0.15 * host, 0.51 * host), correction=CORRECTION.get(device.type, Uncertain(1.0, 0.6, 1.6)),
        **({"reserved": NOTHING, "fragmentation": ONE} if on_cpu else {}),
    )  # fmt: skip


_products = cache(measured)


@cache
def _convolution_flops(device: torch.device) -> float:
    x, weight = torch.full((8, 64, 28, 28), 0.5, device=device), torch.full((64, 64, 3, 3), 0.5, device=device)
    return 2 * 8 * 28 * 28 * 64 * 64 * 9 / seconds_of(lambda: torch.conv2d(x, weight, padding=1), device, LOOK_S)


@cache
def bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / seconds_of(lambda: target.copy_(source), device, LOOK_S)


@cache
def _host_seconds(device: torch.device) -> float:
    """The host's time for one operation of a step, without the operation itself: modules, autograd and Python."""
    layers = [m for _ in range(LAYERS) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.GELU())]
    network = torch.nn.Sequential(*layers).to(device)
    x, weight, bias = (torch.ones(*shape, device=device) for shape in ((2, WIDTH), (WIDTH, WIDTH), (WIDTH,)))

    def step() -> None:
        network(x).sum().backward()
        network.zero_grad()

    @torch.no_grad()
    def alone() -> None:
        for _ in range(LAYERS):
            y = torch.addmm(bias, x, weight)
            y = torch.nn.functional.gelu(torch.layer_norm(y, (WIDTH,), bias, bias))
            torch.mm(x, weight), torch.mm(x.t(), x), x.sum(0)

    return max(1e-6, (seconds_of(step, device, LOOK_S) - seconds_of(alone, device, LOOK_S)) / (LAYERS * 8))
