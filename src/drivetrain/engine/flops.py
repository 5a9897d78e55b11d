"""Counts the floating-point operations of a model's training in one forward of two samples."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from drivetrain.core import streams
from drivetrain.core.peak_flops import Peak, peak
from drivetrain.core.trees import Tree, call, length
from drivetrain.surgery.sync_batchnorm import is_synchronised

_WITH_ADDEND = ("addmm", "baddbmm")  # their first argument is added to the product of the next two


class ModelFlops(NamedTuple):
    """The operations that one sample takes in forward and backward; None where they cannot be counted, with the reason."""

    per_sample: float | None
    reason: str = ""
    output: Tree | None = None  # what the model returned for two samples; None where it could not be run
    needs_two: str = ""  # a BatchNorm that gets one value of a sample for each channel, by name: one sample has no deviation


def count(model: torch.nn.Module, example: Tree) -> ModelFlops:
    """Count the operations. The model and the random numbers stay as they are.

    It is a real forward: without values (on the device "meta") torch would import its compiler, for more than a second. Call it
    before activation checkpointing and sharding: what is computed a second time is not the model's work.
    """
    try:
        with streams.apart():
            total, output, needs_two = _count(model, example)
    except (Exception, SystemExit) as error:  # a forward that needs more than zeros; what is wrong in it ends the first step
        lines = str(error).strip().splitlines() or [""]
        return ModelFlops(None, f"the model's operations cannot be counted: {type(error).__name__}: {lines[0]}")
    if not total:
        return ModelFlops(None, "torch counts no operations of this model", output, needs_two)
    return ModelFlops(total / length(example), output=output, needs_two=needs_two)


def output_of(model: torch.nn.Module, example: Tree) -> Tree | None:
    """Return what the model returns for the example; None where it cannot be run. The model and the random numbers stay."""
    try:
        with streams.apart(), torch.no_grad():
            return call(_twin(model), example)
    except (Exception, SystemExit):
        return None


def _count(model: torch.nn.Module, example: Tree) -> tuple[int, Any, str]:
    twin = _twin(model)
    needs_two = _watch_norms(twin, length(example))
    cudnn = torch.backends.cudnn  # it stays on, which is not what `flags` does by itself
    no_search = cudnn.flags(enabled=cudnn.enabled, benchmark=False, allow_tf32=cudnn.allow_tf32)  # for this batch size
    # Attention as two matrix products: torch has no formula for a CPU's fused kernel.
    with _Counter() as counter, sdpa_kernel(SDPBackend.MATH), no_search:
        output = call(twin, example)
    return counter.total, output, next(iter(needs_two), "")


def _twin(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with the same weights, its own buffers (BatchNorm's statistics), and its own counters of the user's."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def _watch_norms(model: torch.nn.Module, samples: int) -> list[str]:
    """Return the list that gets the names of the BatchNorms that need two samples, each as the forward comes to it."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not is_synchronised(module):

            def watch(norm: Any, inputs: tuple[Any, ...], name: str = name) -> None:
                takes_statistics = norm.training or norm.running_mean is None
                if takes_statistics and inputs[0].numel() == samples * inputs[0].shape[1]:
                    found.append(name)

            module.register_forward_pre_hook(watch)
    return found


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up torch's formulas, those of FlopCounterMode, for the forward and for the backward that would follow.

    The gradient of each operand of a product is a product of the same size.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and else torch imports its compiler for this mode."""
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
        """Return what the MFU is a share of, or why there is none."""
        if self.model.reason:
            return self.model.reason
        unknown = f"the peak of this device in {self.number_format} can neither be looked up nor measured"
        return f"of {self.devices} × {self._peak.source}" if self._peak is not None else unknown

    @cached_property
    def _peak(self) -> Peak | None:
        """The peak of one device, which is looked up or measured when it is first needed: at a record, between timed steps."""
        try:
            return peak(self.device, self.number_format)
        except RuntimeError:  # out of memory, or no matrix products in this format
            return None


def number_format(model: torch.nn.Module, autocast: str | None) -> str:
    """Return the number format of a model's matrix products, under autocast to a dtype or without it."""
    own = next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), "float32")
    dtype = autocast or own
    return "tf32" if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" else dtype
