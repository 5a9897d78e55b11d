"""The device's measured limits, matrix products and memory traffic, and the work that a step asks of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from drivetrain.core.device import synchronize

MEASURE_S = 0.4  # for each limit


class Roofline(NamedTuple):
    """The device's limits, and the work of one update."""

    flops: float  # a second, of a large matrix product in the step's precision
    bandwidth: float  # bytes a second, read and written by a copy
    step_flops: float  # of forward and backward; 0 where torch cannot count them


def measure(trainer: Any, samples: int) -> Roofline:
    """Measure the device; the floating-point operations are those of an update of `samples`."""
    device = trainer.device
    step_flops = samples * (trainer.log.mfu.model.per_sample or 0.0)
    return Roofline(_matmul_flops(trainer, device), _copy_bandwidth(device), step_flops)


def _best_rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """The best of several short measurements, in `amount` a second: an undisturbed one."""
    work()
    synchronize(device)
    best, until = 0.0, time.perf_counter() + MEASURE_S
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        synchronize(device)
        best = max(best, amount / (time.perf_counter() - began))
    return best


def _matmul_flops(trainer: Any, device: torch.device) -> float:
    n = 1024 if device.type == "cpu" else 8192
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    with torch.no_grad(), trainer.precision.autocast():
        dtype = (a @ b).dtype  # autocast's; the cast itself is not measured
    a, b = a.to(dtype), b.to(dtype)
    return _best_rate(lambda: a @ b, 2.0 * n**3, device)


def _copy_bandwidth(device: torch.device) -> float:
    size = 2**27 if device.type == "cpu" else 2**30  # larger than every cache
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _best_rate(lambda: target.copy_(source), 2.0 * size, device)
