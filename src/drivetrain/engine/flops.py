"""Counts the floating-point operations of a model's training in one forward of two samples."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from drivetrain.core.machine import isolation
from drivetrain.core.machine.device import synchronize
from drivetrain.core.step import streams
from drivetrain.core.step.trees import Tree, call, length
from drivetrain.surgery.rank_norms import is_synchronised

# TFLOP/s of matrix products by number format, accumulated in float32 and dense (data sheets give twice as much for sparse ones).
# A device takes the first row whose words are all in its name in torch.
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
_OTHERS = {"MIG", "Laptop", "Ti", "D"}  # words in the names of device slices and of other devices with similar names
_ENOUGH_S = 2e-3  # a product of this duration fills the device
_SMALLEST, _LARGEST = 256, 8192
_SIZE_S = 8e-3  # of repeating products of one size, at least once


class Peak(NamedTuple):
    """Floating-point operations a second, and the source of the number."""

    flops: float
    source: str


def peak(device: torch.device, number_format: str) -> Peak:
    """Return a device's peak in "float32", "tf32", "bfloat16" or "float16". A measurement takes some milliseconds."""
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
def _measured_once(device: torch.device, number_format: str, _: int) -> float:
    return measured(device, number_format)


def measured(device: torch.device, number_format: str) -> float:
    """Measure the operations a second of matrix products, in growing sizes until one takes long enough.

    On a CPU one thread is measured, by its CPU time, and multiplied by the threads: on a busy machine several threads would wait
    for each other.
    """
    if device.type != "cpu":
        return _products(device, number_format, time.perf_counter)
    number = torch.get_num_threads()
    with isolation.threads(1):
        return number * _products(device, number_format, time.thread_time)


def _products(device: torch.device, number_format: str, clock: Callable[[], float]) -> float:
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


_WITH_ADDEND = ("addmm", "baddbmm")  # their first argument is added to the product of the next two


class ModelFlops(NamedTuple):
    """The operations that one sample takes in forward and backward; None where they cannot be counted, with the reason."""

    per_sample: float | None
    reason: str = ""
    output: Tree | None = None  # what the model returned for two samples; None where it could not be run
    needs_two: str = ""  # the name of a BatchNorm with one value of a sample for each channel: one sample has no deviation
    failed: bool = False  # whether that forward failed


def count(model: torch.nn.Module, example: Tree, samples: int = 0) -> ModelFlops:
    """Count the operations for an example of `samples`; 0: its length. The model and the random numbers stay as they are.

    It runs a real forward: on the device "meta" torch would import its compiler, which takes more than a second. Call it before
    activation checkpointing and sharding: recomputation is not the model's work.
    """
    samples = samples or length(example)
    needs_two: list[str] = []
    try:
        with streams.apart():
            total, output = _count(model, example, samples, needs_two)
    except (Exception, SystemExit) as error:  # a model that cannot be copied, or watched
        lines = str(error).strip().splitlines() or [""]
        reason = f"the model's operations cannot be counted: {type(error).__name__}: {lines[0]}"
        return ModelFlops(None, reason, needs_two="".join(needs_two[:1]), failed=True)
    per_sample, reason = (total / samples, "") if total else (None, "torch counts no operations of this model")
    return ModelFlops(per_sample, reason, output, "".join(needs_two[:1]))


def _count(model: torch.nn.Module, example: Tree, samples: int, needs_two: list[str]) -> tuple[int, Tree]:
    # A copy with the same weights, its own buffers (BatchNorm's statistics), and its own counters of the user's.
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    _watch_norms(twin, samples, needs_two)
    cudnn = torch.backends.cudnn  # it stays on; `flags` alone would change that
    no_search = cudnn.flags(enabled=cudnn.enabled, benchmark=False, allow_tf32=cudnn.allow_tf32)  # for this batch size
    # Attention as two matrix products: torch has no formula for a CPU's fused kernel.
    with _Counter() as counter, sdpa_kernel(SDPBackend.MATH), no_search:
        output = call(twin, example)
    return counter.total, output


def _watch_norms(model: torch.nn.Module, samples: int, found: list[str]) -> None:
    """Add to `found` the names of the BatchNorms that need two samples, when the forward reaches them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not is_synchronised(module):

            def watch(norm: torch.nn.Module, inputs: tuple[torch.Tensor, ...], name: str = name) -> None:
                takes_statistics = norm.training or norm.running_mean is None
                if takes_statistics and inputs[0].numel() == samples * inputs[0].shape[1]:
                    found.append(name)

            module.register_forward_pre_hook(watch)


class _Counter(TorchDispatchMode):
    """Adds up the formulas of torch's FlopCounterMode for the forward and the backward that would follow.

    The gradient of each operand of a product is a product of the same size.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and with True torch would import its compiler for this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            first = int(func._overloadpacket.__name__ in _WITH_ADDEND)
            gradients = sum(operand.requires_grad for operand in args[first : first + 2])
            self.total += int(formula(*args, **kwargs, out_val=out)) * (1 + gradients)
        return out


@dataclass
class Mfu:
    """The model FLOPs utilization (MFU) of a run (Chowdhery et al. 2022, PaLM, appendix B)."""

    model: ModelFlops
    device: torch.device
    number_format: str  # of the matrix products, as in peak_flops
    devices: int  # over all ranks

    def at(self, samples_per_second: float | None) -> float | None:
        """Return the MFU at a rate; None where the model's operations cannot be counted, or the peak is not known."""
        if self.model.per_sample is None or samples_per_second is None or self._peak is None:
            return None
        return self.model.per_sample * samples_per_second / (self.devices * self._peak.flops)

    def note(self) -> str:
        """Return the peak that the MFU is a share of, or the reason why there is none."""
        if self.model.reason:
            return self.model.reason
        unknown = f"the peak of this device in {self.number_format} can neither be looked up nor measured"
        return f"of {self.devices} × {self._peak.source}" if self._peak is not None else unknown

    @cached_property
    def _peak(self) -> Peak | None:
        """The peak of one device, looked up or measured when it is first needed: at a record, between timed steps."""
        try:
            return peak(self.device, self.number_format)
        except RuntimeError:  # out of memory, or no matrix products in this format
            return None


def number_format(model: torch.nn.Module, autocast: str | None) -> str:
    """Return the number format of a model's matrix products, under autocast to a dtype or without it."""
    own = next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), "float32")
    dtype = autocast or own
    return "tf32" if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" else dtype
