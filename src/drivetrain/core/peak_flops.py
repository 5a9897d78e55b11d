"""The most floating-point operations a second that a device does in matrix products: from its data sheet, or measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from drivetrain.core.device import synchronize
from drivetrain.core.lazy import torch

# TFLOP/s of matrix products by number format, accumulated in float32 and not sparse (data sheets give twice as much for
# sparse ones). The first row counts whose words are all in the name that torch gives the device.
_TABLE: tuple[tuple[str, dict[str, float]], ...] = (
    # NVIDIA Blackwell: data sheets of the GB200 NVL72 and HGX B200, whitepaper "RTX Blackwell GPU Architecture"
    ("GB200", {"bfloat16": 2500, "float16": 2500, "tf32": 1250, "float32": 80}),
    ("B200", {"bfloat16": 2250, "float16": 2250, "tf32": 1125, "float32": 75}),
    ("RTX 5090", {"bfloat16": 209.5, "float16": 209.5, "tf32": 104.8, "float32": 104.8}),
    # NVIDIA Hopper: data sheets of the H200, H100 and GH200
    ("H200 NVL", {"bfloat16": 835.5, "float16": 835.5, "tf32": 417.5, "float32": 60}),
    ("H200", {"bfloat16": 989.5, "float16": 989.5, "tf32": 494.5, "float32": 67}),
    ("H100 NVL", {"bfloat16": 835.5, "float16": 835.5, "tf32": 417.5, "float32": 60}),
    ("H100 PCIe", {"bfloat16": 756.5, "float16": 756.5, "tf32": 378, "float32": 51}),
    ("H100", {"bfloat16": 989.5, "float16": 989.5, "tf32": 494.5, "float32": 67}),
    ("GH200", {"bfloat16": 989.5, "float16": 989.5, "tf32": 494.5, "float32": 67}),
    # NVIDIA Ada: data sheets of the L4 and L40S, whitepaper "Ada GPU Architecture"
    ("L40S", {"bfloat16": 362, "float16": 362, "tf32": 183, "float32": 91.6}),
    ("L4", {"bfloat16": 121, "float16": 121, "tf32": 60, "float32": 30.3}),
    ("RTX 4090", {"bfloat16": 165.2, "float16": 165.2, "tf32": 82.6, "float32": 82.6}),
    # NVIDIA Ampere: data sheets of the A100, A30 and A40, whitepaper "GA102 GPU Architecture"
    ("A100", {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5}),
    ("A30", {"bfloat16": 165, "float16": 165, "tf32": 82, "float32": 10.3}),
    ("A40", {"bfloat16": 149.7, "float16": 149.7, "tf32": 74.8, "float32": 37.4}),
    ("RTX 3090", {"bfloat16": 71, "float16": 71, "tf32": 35.6, "float32": 35.6}),
    # NVIDIA Volta and Turing: data sheets of the V100 and T4
    ("V100 SXM2", {"float16": 125, "float32": 15.7}),
    ("V100 PCIE", {"float16": 112, "float32": 14}),
    ("Tesla T4", {"float16": 65, "float32": 8.1}),
    # AMD: data sheets of the Instinct MI300X and MI325X
    ("MI300X", {"bfloat16": 1307.4, "float16": 1307.4, "tf32": 653.7, "float32": 163.4}),
    ("MI325X", {"bfloat16": 1307.4, "float16": 1307.4, "tf32": 653.7, "float32": 163.4}),
)
_OTHERS = {"MIG", "Laptop", "Ti", "D"}  # words of a slice of a device, or of another one with a similar name
_ENOUGH_S = 2e-3  # a product that takes as long fills the device
_SMALLEST, _LARGEST = 256, 8192
_SIZE_S = 8e-3  # in which products of one size are repeated, at least once


class Peak(NamedTuple):
    """Floating-point operations a second, and where the number comes from."""

    flops: float
    source: str


def peak(device: torch.device, number_format: str) -> Peak:
    """Return a device's peak in "float32", "tf32", "bfloat16" or "float16". It takes some ms where it must be measured."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)  # CPU and MPS have none
    name = str(name_of(device)) if name_of is not None else ""
    if (tflops := from_table(name, number_format)) is not None:
        return Peak(1e12 * tflops, f"{tflops:g} TFLOP/s in {number_format}, data sheet of {name}")
    flops = _measured_once(device, number_format, torch.get_num_threads())
    return Peak(flops, f"{flops / 1e12:.3g} TFLOP/s in {number_format}, measured with matrix products")


def from_table(name: str, number_format: str) -> float | None:
    """Return the TFLOP/s of the device that torch calls `name`; None where its data sheet is not in the table."""
    words = set(name.replace("-", " ").split())
    for key, formats in _TABLE:
        if words.issuperset(key.split()) and not words & _OTHERS:
            return formats.get(number_format)
    return None


@cache
def _measured_once(device: torch.device, number_format: str, threads: int) -> float:
    """On a CPU: one thread's, by its own CPU time, times the threads. On a busy machine several threads wait for each other."""
    if device.type != "cpu":
        return measured(device, number_format)
    torch.set_num_threads(1)
    try:
        return threads * measured(device, number_format, time.thread_time)
    finally:
        torch.set_num_threads(threads)


def measured(device: torch.device, number_format: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measure the operations a second of matrix products, in growing sizes until one takes long enough."""
    dtype = getattr(torch, number_format, torch.float32)
    size, best = _SMALLEST, 0.0
    while True:
        a = torch.ones(size, size, device=device, dtype=dtype)
        seconds = _best_seconds(a, clock)
        best = max(best, 2.0 * size**3 / seconds)
        if seconds > _ENOUGH_S or size == _LARGEST:
            return best
        size *= 2


@torch.no_grad()
def _best_seconds(a: torch.Tensor, clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest of several products: other programs may disturb some."""
    taken: list[float] = []
    while len(taken) < 2 or sum(taken) < _SIZE_S:
        synchronize(a.device)
        began = clock()
        torch.mm(a, a)
        synchronize(a.device)
        taken.append(clock() - began)
    return min(taken)
