"""What devices are asked."""

from types import SimpleNamespace

import pytest
import torch

from drivetrain.core.device import is_out_of_memory, sum_dtype


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GiB, other allocations: 384 KiB)"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("out of memory"), False),  # a measured arm that ends itself, so as not to go on with half a batch
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
