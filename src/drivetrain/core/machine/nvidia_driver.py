"""Asks NVIDIA's driver for its devices, in a separate interpreter that imports nothing but the standard library.

The driver does not survive a fork: a process that started it, even by torch.cuda.is_available(), cannot fork ranks that use the
devices. So a process that will fork calls `devices`, which runs this file as a program.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import astuple, dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, also where CUDA_VISIBLE_DEVICES is empty
CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
TIMEOUT_S = 60.0  # without a persistent driver a machine of eight devices needs seconds


@dataclass(frozen=True)
class Devices:
    """The devices that the driver shows to this process, given CUDA_VISIBLE_DEVICES, containers and MIG."""

    count: int = 0
    capability: tuple[int, int] = (0, 0)  # the lowest compute capability
    cuda: int = 0  # the newest CUDA version that the driver runs, such as 12
    problem: str = ""  # the reason why the driver does not answer


def installed() -> bool:
    """True if there is a driver. Loading its library does not start it."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def devices() -> Devices:
    """The devices that the driver shows. This process does not start it."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
        count, capability, cuda, problem = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Devices(problem=f"asking NVIDIA's driver failed: {error}")
    return Devices(count, tuple(capability), cuda, problem)


def ask(driver: Any) -> Devices:
    """Start the driver in this process, and ask it."""
    if error := driver.cuInit(0):
        return Devices(problem="" if error == NO_DEVICE else f"NVIDIA's driver does not start (error {error} of cuInit)")
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    capabilities = [(_attribute(driver, n, CAPABILITY[0]), _attribute(driver, n, CAPABILITY[1])) for n in range(count.value)]
    return Devices(count.value, min(capabilities, default=(0, 0)), version.value // 1000)


def _attribute(driver: Any, number: int, attribute: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value


if __name__ == "__main__":
    print(json.dumps(astuple(ask(ctypes.CDLL(LIBRARY)))))
