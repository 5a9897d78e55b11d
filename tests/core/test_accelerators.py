"""Finding devices without starting them."""

import ctypes
import json
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from drivetrain.core.machine import accelerators, nvidia_driver
from drivetrain.core.machine.accelerators import Accelerator
from drivetrain.core.machine.device import is_out_of_memory, sum_dtype
from drivetrain.core.machine.nvidia_driver import Devices


class Driver:
    """NVIDIA's driver with devices of these compute capabilities."""

    def __init__(self, *capabilities, error=0):
        self.capabilities, self.error, self.chosen = capabilities, error, 0

    def cuInit(self, flags):
        return self.error or flags  # any flag is an invalid value

    def cuDriverGetVersion(self, version):
        version._obj.value = 13020

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.capabilities)

    def cuDeviceGet(self, device, number):
        device._obj.value = number

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = self.capabilities[device.value][(75, 76).index(attribute)]


@pytest.fixture
def nvidia(monkeypatch):
    """Let the machine have NVIDIA's driver, which shows these devices; a list with an entry for each time it is asked."""

    def install(found: Devices) -> list:
        calls: list = []
        monkeypatch.setattr(nvidia_driver, "installed", lambda: True)
        monkeypatch.setattr(nvidia_driver, "devices", lambda: (calls.append(1), found)[1])
        return calls

    for cached in (accelerators._find, accelerators._nvidia_devices):
        cached.cache_clear()
    yield install
    for cached in (accelerators._find, accelerators._nvidia_devices):
        cached.cache_clear()


@pytest.fixture
def built_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(metadata, "version", lambda name: "2.15.0+cu132")


def test_the_driver_is_asked_for_count_and_lowest_capability():
    assert nvidia_driver.ask(Driver((9, 0), (8, 6))) == Devices(2, (8, 6), 13)
    assert nvidia_driver.ask(Driver()) == Devices(0, (0, 0), 13)


def test_no_visible_device_is_no_problem_and_a_broken_driver_is_one():
    assert nvidia_driver.ask(Driver(error=100)) == Devices()
    assert "error 803 of cuInit" in nvidia_driver.ask(Driver(error=803)).problem


def test_the_driver_is_asked_by_a_program_that_imports_no_torch(monkeypatch):
    """It runs the file itself, alone; here it ends, as there is no driver, or it answers."""
    asked = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda words, **how: (asked.append(words), real(words, **how))[1])
    found = nvidia_driver.devices()
    assert asked == [[sys.executable, "-I", "-S", nvidia_driver.__file__]]
    assert found.count or found.problem or found == Devices(cuda=found.cuda)
    monkeypatch.setattr(
        subprocess, "run", lambda words, **how: subprocess.CompletedProcess(words, 0, json.dumps([2, [9, 0], 13, ""]), "")
    )
    assert nvidia_driver.devices() == Devices(2, (9, 0), 13)


def test_without_a_driver_nothing_is_asked(monkeypatch, built_for_cuda):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    monkeypatch.setattr(subprocess, "run", None)
    accelerators._find.cache_clear()
    assert accelerators.find() == Accelerator()
    assert accelerators.device_count() == 0
    accelerators._find.cache_clear()


def test_devices_are_found_once_for_each_choice_of_visible_ones(monkeypatch, nvidia, built_for_cuda):
    calls = nvidia(Devices(2, (8, 6), 13))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert accelerators.device_count() == 2
    assert accelerators.find() == accelerators.find() == Accelerator("cuda", 2, (8, 6))
    assert len(calls) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    accelerators.device_count()
    assert len(calls) == 2


def test_an_old_driver_is_told_from_no_device(nvidia, built_for_cuda):
    nvidia(Devices(1, (9, 0), 12))
    found = accelerators.find()
    assert (found.type, found.count) == ("cpu", 0)
    assert found.problem == "NVIDIA's driver runs CUDA 12, and this torch was built for CUDA 13.2"


def test_what_a_torch_for_cpus_cannot_use_is_no_device(nvidia, monkeypatch):
    nvidia(Devices(1, (9, 0), 13))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(metadata, "version", lambda name: "2.15.0+cpu")
    assert accelerators.find() == Accelerator()
    assert accelerators.device_count() == 0


class Xpu:
    """torch's module of a device type, of which a forked child is asked."""

    def __init__(self, bad_fork=False, error=None):
        self.bad_fork, self.error, self.asked = bad_fork, error, []

    def is_initialized(self):
        return False

    def _is_in_bad_fork(self):
        return self.bad_fork

    def init(self):
        self.asked.append(1)
        if self.error:
            raise RuntimeError(self.error)

    def device_count(self):
        return 3


@pytest.mark.parametrize(
    ("module", "found", "asked_here"),
    [
        (Xpu(), Accelerator("xpu", 3), 0),
        (Xpu(error="no driver\nmore"), Accelerator(problem="no driver"), 0),
        (Xpu(bad_fork=True), Accelerator("xpu", 3), 1),  # a notebook has used it before: nothing is lost by asking
    ],
    ids=["found", "broken", "used before"],
)
def test_other_devices_are_asked_for_by_torch_in_a_child(monkeypatch, module, found, asked_here):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(accelerators.torch, "get_device_module", lambda type_: module)
    accelerators._find.cache_clear()
    assert accelerators.find() == found
    assert len(module.asked) == asked_here
    accelerators._find.cache_clear()


# --- what devices are asked ---


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GiB, other allocations: 384 KiB)"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("out of memory"), False),  # a measured variant that ends itself, so as not to go on with half a batch
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error, is_it):
    assert is_out_of_memory(error) is is_it


@pytest.mark.parametrize(("has_fp64", "dtype"), [(True, torch.float64), (False, torch.float32)])
def test_sums_are_in_float64_where_the_device_has_it(monkeypatch, has_fp64, dtype):
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has_fp64))
    assert sum_dtype(torch.device("xpu", 0)) is dtype
    assert sum_dtype(torch.device("cuda", 0)) is sum_dtype(torch.device("cpu")) is torch.float64
    assert sum_dtype(torch.device("mps")) is torch.float32


# --- the energy that a device used, by the counters of NVML, which are made up here ---


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """A GPU whose counter says what is set, in millijoules."""
    made = SimpleNamespace(NVMLError=NVMLError, counter=5_000, asked=[])
    accelerators._nvml.cache_clear()

    def total(handle):
        if made.counter is None:
            raise NVMLError("not supported")
        return made.counter

    made.nvmlInit = lambda: made.asked.append("init")  # nothing answers before
    made.nvmlDeviceGetHandleByUUID = lambda uuid: made.asked.append(uuid)
    made.nvmlDeviceGetTotalEnergyConsumption = total
    made.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=total(handle) // 100)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-12"))
    yield made
    accelerators._nvml.cache_clear()


def test_joules_and_use_are_read_from_the_devices_counter(nvml):
    assert accelerators.used(torch.device("cuda", 0)) == ("GPU-ab-12", 5.0)
    assert nvml.asked == ["init", "GPU-ab-12"]
    assert accelerators.busy(torch.device("cuda", 0)) == 0.5


def test_where_nothing_tells_there_is_none(nvml, monkeypatch):
    assert accelerators.used(torch.device("cpu")) is None
    nvml.counter = None  # a MIG slice, or an old card
    assert accelerators.used(torch.device("cuda", 0)) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    accelerators._nvml.cache_clear()
    assert accelerators.busy(torch.device("cuda", 0)) is None
    assert accelerators.used(torch.device("cuda", 0)) is None


def test_each_device_of_all_ranks_counts_once():
    assert accelerators.total([("a", 1.0), ("b", 5.0)], [("a", 4.0), ("b", 7.5)]) == 5.5
    assert accelerators.total([("a", 1.0), ("a", 1.5)], [("a", 4.0), ("a", 4.5)]) == 3.0
    assert accelerators.total([("a", 1.0), None], [("a", 4.0), None]) is None
    assert accelerators.total([None], [("a", 4.0)]) is None
    assert accelerators.total([], []) is None
