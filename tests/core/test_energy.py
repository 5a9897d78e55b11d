"""The energy that a device used, by the counters of NVML, which are made up here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from drivetrain.core import energy


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """A GPU whose counter says what is set, in millijoules."""
    made = SimpleNamespace(NVMLError=NVMLError, counter=5_000, asked=[])

    def total(handle):
        if made.counter is None:
            raise NVMLError("not supported")
        return made.counter

    made.nvmlInit = lambda: None
    made.nvmlDeviceGetHandleByUUID = lambda uuid: made.asked.append(uuid)
    made.nvmlDeviceGetTotalEnergyConsumption = total
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="ab-12"))
    return made


def test_joules_are_read_from_the_devices_counter(nvml):
    assert energy.used(torch.device("cuda", 0)) == ("GPU-ab-12", 5.0)
    assert nvml.asked == ["GPU-ab-12"]


def test_where_nothing_tells_there_is_none(nvml, monkeypatch):
    assert energy.used(torch.device("cpu")) is None
    nvml.counter = None  # a MIG slice, or an old card
    assert energy.used(torch.device("cuda", 0)) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert energy.used(torch.device("cuda", 0)) is None


def test_each_device_of_all_ranks_counts_once():
    assert energy.total([("a", 1.0), ("b", 5.0)], [("a", 4.0), ("b", 7.5)]) == 5.5
    assert energy.total([("a", 1.0), ("a", 1.5)], [("a", 4.0), ("a", 4.5)]) == 3.0
    assert energy.total([("a", 1.0), None], [("a", 4.0), None]) is None
    assert energy.total([None], [("a", 4.0)]) is None
    assert energy.total([], []) is None
