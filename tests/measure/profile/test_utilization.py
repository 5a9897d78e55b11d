"""What the device does during an update, from a profile's events."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType

from drivetrain.core.progress import Progress
from drivetrain.measure.profile import step as utilization
from drivetrain.measure.profile.step import END, READING


class Range(NamedTuple):
    start: float
    end: float

    def elapsed_us(self) -> float:
        return self.end - self.start


class Event:
    def __init__(
        self, name: str, start: float, end: float, device: DeviceType = DeviceType.CPU, thread: int = 1, annotation: bool = False
    ) -> None:
        self.name, self.time_range, self.device_type, self.thread = name, Range(start, end), device, thread
        self.cpu_parent, self.is_user_annotation = None, annotation


def test_what_overlaps_is_counted_once():
    assert utilization._union_us([Event("a", 0, 4), Event("b", 2, 5), Event("c", 3, 4), Event("d", 7, 8)]) == 6
    assert utilization._union_us([]) == 0


def test_on_a_cpu_other_threads_are_not_the_steps():
    events = [
        Event(READING, 0, 20), Event("aten::mm", 20, 50), Event("aten::add", 60, 70), Event("aten::stack", 0, 100, thread=2),
        Event(END, 90, 100),
    ]  # fmt: skip
    found = utilization._cpu_shares(events, 100.0)
    assert found == {"in operations": pytest.approx(0.4), "between operations (Python, dispatch)": pytest.approx(0.4)}
    assert utilization._cpu_shares([Event(READING, 0, 20)], 100.0) == {}


@pytest.mark.parametrize("device", [DeviceType.CUDA, DeviceType.XPU])
def test_on_a_device_our_own_waiting_is_not_the_hosts(device):
    cuda = device
    events = [
        # Named ranges are repeated on the device: they are no work of it.
        Event("Optimizer.step#SGD.step", 0, 90, cuda, annotation=True), Event(END, 70, 100, cuda, annotation=True),
        Event("gemm", 0, 30, cuda), Event("Memcpy HtoD", 20, 40, cuda), Event("relu", 50, 60, cuda),
        Event("cudaStreamSynchronize", 10, 15), Event(END, 80, 100), Event("cudaDeviceSynchronize", 81, 99),
    ]  # fmt: skip
    found = utilization._device_shares(events, 100.0)
    assert found == {
        "the device computes": pytest.approx(0.4), "the device copies": pytest.approx(0.2),
        "the device is idle": pytest.approx(0.5), "the host waits for the device": pytest.approx(0.05),
    }  # fmt: skip
    assert utilization._device_shares(events[5:], 100.0) == {}, "a profiler that sees nothing of the device"


class Trainer:
    """Enough of one for an update."""

    device, log_every = torch.device("cpu"), 100

    def __init__(self) -> None:
        self.w = torch.rand(40, 40)
        self.step = self
        self.ema, self.timer, self.scheduler, self.log = (mock.Mock() for _ in range(4))
        self.progress = Progress()

    def micro_batch(self, batch: Any, loss_sum: torch.Tensor) -> None:
        self.w @ self.w

    def update(self) -> bool:
        return True

    def zero_grad(self) -> None:
        pass


class MicroBatch:
    last = True


def test_a_profile_of_updates_has_the_time_in_operations_and_between_them():
    found = utilization.time_shares(Trainer(), iter([MicroBatch()] * 99))
    assert list(found) == ["in operations", "between operations (Python, dispatch)"]
    assert all(share > 0 for share in found.values())
