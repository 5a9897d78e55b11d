"""The time of a step: each operation takes as long as its arithmetic, its memory traffic or its launch, whichever is longest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from drivetrain.measure.forecast.devices import Device
from drivetrain.measure.forecast.figure import Figure
from drivetrain.measure.forecast.replay import Row

COMPUTE, BANDWIDTH, LAUNCH = "compute", "memory bandwidth", "launch"
FUSED_BYTES = Figure(0.5, 0.3, 0.7)  # of pointwise operations' traffic that a compiler's fused kernels keep
COMPILED_HOST = Figure(0.3, 0.15, 0.5)  # of the host's time for an operation, in a compiled forward and backward
RECORDED_HOST = Figure(0.03, 0.01, 0.1)  # where the step is replayed as one graph
# Where selective recomputation asks a policy for each operation, in Python (from the calibration's runs on a CPU).
ASKED_HOST = Figure(4.0, 2.5, 6.0)


class Compiled(NamedTuple):
    """What compiling leaves of the traffic of pointwise operations and of the host's time, as factors."""

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
    likely = [_seconds(row, device, tf32, compiled, 0) for row in rows]
    sums = [sum(seconds for seconds, _ in likely)]
    sums += [sum(_seconds(row, device, tf32, compiled, which)[0] for row in rows) for which in (1, 2)]
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
    likely = [(row.seconds is not None, _seconds(row, device, False, EAGER, 0)[0]) for row in rows]
    return sum(seconds for timed, seconds in likely if timed) / (sum(seconds for _, seconds in likely) or 1.0)


def _seconds(row: Row, device: Device, tf32: bool, compiled: Compiled, which: int) -> tuple[float, str]:
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
