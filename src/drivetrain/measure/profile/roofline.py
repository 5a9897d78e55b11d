"""What this device can do at most: matrix products and memory traffic, measured, beside what a step asks of it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from drivetrain.core.device import synchronize

SECONDS = 0.4  # of measuring, for each


class Roofline(NamedTuple):
    """Rates of the device, and the work of one update."""

    flops: float  # a second, of a large matrix product in the step's precision
    bandwidth: float  # bytes a second, read and written by a copy
    step_flops: float  # of forward and backward; 0 where they could not be counted


def measure(trainer: Any, micro: Any, micros: int) -> Roofline:
    """Measure the device; count the floating-point operations of one update, which is `micros` times `micro`."""
    device = trainer.device
    return Roofline(_matmul(trainer, device), _copy(device), micros * _counted(trainer, micro))


def _rate(work: Any, amount: float, device: torch.device) -> float:
    """The best of several short measurements: what the device reaches when nothing is in its way."""
    work()
    synchronize(device)
    best, until = 0.0, time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        work()
        synchronize(device)
        best = max(best, amount / (time.perf_counter() - began))
    return best


def _matmul(trainer: Any, device: torch.device) -> float:
    n = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    with torch.no_grad(), trainer.precision.autocast():
        dtype = (a @ b).dtype  # as autocast has it: casting is not what is measured
    a, b = a.to(dtype), b.to(dtype)
    return _rate(lambda: a @ b, 2.0 * n**3, device)


def _copy(device: torch.device) -> float:
    size = 2**30 if device.type == "cuda" else 2**27  # beyond every cache
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2.0 * size, device)


def _counted(trainer: Any, micro: Any) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with FlopCounterMode(display=False) as counter, trainer.precision.autocast():
            trainer.loss(trainer.model(micro.x), micro.y).backward()
    except Exception:  # an operation that torch cannot count
        return 0.0
    finally:
        trainer.zero_grad()
    return float(counter.get_total_flops())
