"""Tests whether torch.optim's classes make fused updates."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from drivetrain.core.machine.torch_patches import compiling, keep_compiler_unimported


@functools.cache
def has_fused(name: str, device: str) -> bool:
    """True if torch.optim's class `name` makes fused updates on this type of device. The test runs on a CPU and starts no device.

    Releases differ: torch 2.11 has an Adagrad kernel for CUDA, but its class refuses it in the first update.
    """
    kernel, key = f"aten::_fused_{name.lower()}_", torch._C._dispatch_key_for_device(device)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(kernel, key)) and _is_accepted(name, device)


def _is_accepted(name: str, device: str) -> bool:
    """True if the class makes a fused update of a scalar that claims to be on such a device."""
    keep_compiler_unimported()
    with _disable_current_modes():  # a fake tensor would have no `place`
        number = _Placed(torch.zeros(1))
        optimizer = getattr(torch.optim, name)([number], fused=True)
        number.grad, number.place = torch.zeros(1), torch.device(device)
        try:
            with torch.no_grad(), _OnCpu(), compiling():  # torch asks for devices that record graphs, unless it compiles
                inspect.unwrap(type(optimizer).step)(optimizer)  # without hooks: it is not an update of the run
        except RuntimeError:  # "`fused=True` requires all the params to be … of supported devices"
            return False
    return True


class _Placed(torch.nn.Parameter):
    """A parameter in the CPU's memory that claims to be on another `device`."""

    place = torch.device("cpu")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place


class _OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU that are requested for a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if kwargs and "device" in kwargs else {})})
