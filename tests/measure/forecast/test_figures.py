"""Memory over ranks, the roofline and devices, on made-up figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from drivetrain.engine.rehearsal.fake_step import GRADIENTS, PARAMETERS, STATE
from drivetrain.engine.rehearsal.recorder import OTHER
from drivetrain.measure.forecast import forecast, plan, replay
from drivetrain.measure.forecast.plan import Ranks
from drivetrain.measure.forecast.replay import _TABLE, FORECAST_ONLY, Device, Figure, Row, known

EXACT, NO_TIME = Figure.exactly(1.0), Figure.exactly(0.0)
KINDS = ("product", "convolution", "attention", "bandwidth")
# A device of 1 TFLOP/s and 1 GB/s, whose host takes no time.
DEVICE = Device(
    "made up", 1e9, {"float32": 1e12}, 1e9, 1e9, "a test", efficiency=dict.fromkeys(KINDS, EXACT),
    kernel_s=NO_TIME, host_s=NO_TIME, view_s=NO_TIME,
)  # fmt: skip
PARTS = {PARAMETERS: 800, GRADIENTS: 800, STATE: 1600, OTHER: 1000, "batch": 100}


def row(kind: str = "product", flops: int = 0, nbytes: int = 0, times: int = 1, **rest: object) -> Row:
    values = {"name": "mm", "dtype": "float32", "phase": "forward", "seconds": None, "at_most": 0, **rest}
    return Row(kind=kind, flops=flops, nbytes=nbytes, times=times, **values)  # type: ignore[arg-type]


def seconds(rows: Sequence[Row], device: Device = DEVICE) -> float:
    return replay.step_time(rows, device).seconds.value


def test_an_operation_takes_as_long_as_its_arithmetic_or_its_traffic():
    assert seconds([row(flops=2 * 10**12)]) == 2.0
    assert seconds([row(flops=10**12, nbytes=3 * 10**9)]) == 3.0
    assert seconds([row(flops=10**12, times=4), row("view", nbytes=10**12)]) == 4.0
    assert replay.step_time([row(flops=10**12), row("pointwise", nbytes=3 * 10**9)], DEVICE).shares == {
        "compute": 0.25, "memory bandwidth": 0.75,
    }  # fmt: skip


def test_what_was_measured_here_counts_in_place_of_the_roofline():
    assert seconds([row(flops=10**15, seconds=0.5, times=2)]) == 1.0


def test_a_step_of_small_operations_is_limited_by_the_launch():
    slow_host = replace(DEVICE, host_s=Figure(0.1, 0.05, 0.2))
    found = replay.step_time([row(flops=10**9, times=10)], slow_host)
    assert found.seconds == pytest.approx((1.0, 0.5, 2.0))
    assert found.shares == {"launch": 1.0}
    waiting = replay.step_time([row(flops=10**12)], replace(slow_host, asynchronous=False))
    assert waiting.seconds.value == pytest.approx(1.1)  # on a CPU nothing is queued: both take their time


def test_compiling_saves_traffic_of_pointwise_operations_alone():
    half = replay.Compiled(Figure.exactly(0.5), EXACT)
    rows = [row("pointwise", nbytes=10**9), row("product", nbytes=10**9), row("pointwise", nbytes=10**9, phase="update")]
    assert replay.step_time(rows, DEVICE, compiled=half).seconds.value == 2.5


def test_tensor_cores_compute_float32_where_tf32_is_on():
    device = replace(DEVICE, flops={"float32": 1e12, "tf32": 1e13})
    rows = [row(flops=10**13)]
    assert replay.step_time(rows, device).seconds.value == 10.0
    assert replay.step_time(rows, device, tf32=True).seconds.value == 1.0


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_fsdp_divides_what_the_ranks_share(ranks: int):
    found = plan.sharded(PARTS, Ranks(ranks, ranks, largest_block=0.0))
    assert found == {PARAMETERS: 800 / ranks, GRADIENTS: 800 / ranks, STATE: 1600 / ranks, OTHER: 1000, "batch": 100}


def test_fsdp_gathers_two_blocks_or_keeps_all():
    assert plan.sharded(PARTS, Ranks(4, 4, largest_block=100.0))[PARAMETERS] == 200 + 2 * 100
    assert plan.sharded(PARTS, Ranks(4, 4, keeps_gathered=True, largest_block=100.0))[PARAMETERS] == 200 + 800
    assert plan.sharded(PARTS, Ranks(4, 4, whole_gradients=True))[GRADIENTS] == 800
    assert plan.sharded(PARTS, Ranks(4)) == PARTS  # ddp


def test_what_is_offloaded_is_not_on_the_device():
    found = plan.sharded(PARTS, Ranks(4, 4, offloaded=True, largest_block=100.0))
    assert found == {PARAMETERS: 200, GRADIENTS: 100, STATE: 0, OTHER: 1000, "batch": 100}
    assert plan.sharded(PARTS, Ranks(1, 1, offloaded=True))[STATE] == 0


def test_a_short_run_has_a_time():
    assert [forecast.run_time(s) for s in (0.004, 0.25, 1.0, 75.0)] == ["4 ms", "250 ms", "1.0 s", "75 s"]


def test_bytes_that_ranks_send():
    assert plan.sent_bytes(800.0, Ranks(), 1) == 0
    assert plan.sent_bytes(800.0, Ranks(4), 3) == 2 * 0.75 * 800  # one all-reduce, whatever the micro-batches
    assert plan.sent_bytes(800.0, Ranks(4, 4), 1) == 3 * 0.75 * 800  # gathered twice, reduced once
    assert plan.sent_bytes(800.0, Ranks(4, 4, keeps_gathered=True), 1) == 2 * 0.75 * 800


def test_the_peak_has_kernels_own_buffers_where_they_were_measured_else_an_allowance():
    counted = dict.fromkeys(PARTS, 1000)
    device = replace(DEVICE, reserved=Figure.exactly(0.0), fragmentation=EXACT)
    measured = plan.peak_memory(counted, 6000, True, Ranks(), device)
    assert measured.parts["workspace"] == 1000
    assert measured.peak.value == 6000
    assert measured.peak.holds(6000)
    allowed = plan.peak_memory(counted, 6000, False, Ranks(), device)
    assert allowed.parts["workspace"] == 0.05 * 1000
    assert allowed.peak.low < measured.peak.low
    assert allowed.peak.high - allowed.peak.low > measured.peak.high - measured.peak.low


def test_network_time_hides_behind_the_backward():
    nothing_hidden = replay.network_seconds(0.7e9, DEVICE, 0.0)
    assert nothing_hidden.value == nothing_hidden.high == pytest.approx(1.0)
    hidden = replay.network_seconds(0.7e9, DEVICE, 10.0)
    assert hidden.value == hidden.low == 0.0
    assert hidden.high == pytest.approx(1.0)


def test_figures_add_with_their_intervals():
    assert (Figure(1, 0, 2) + Figure(2, 2, 3)).times(3) == (9, 6, 15)
    assert Figure.within(10, 0.5, 2) == (10, 5, 20)


@pytest.mark.parametrize("name", list(_TABLE))
def test_every_device_of_the_table_says_that_it_was_not_measured(name: str):
    device = known(name)
    assert FORECAST_ONLY in device.source
    assert device.flops["float32"] > 1e12
    assert device.memory >= 16e9
    assert device.bandwidth < 1e13
    assert device.link <= device.bandwidth


@pytest.mark.parametrize("damaged", ["", "[]", '{"a machine": [1]}', '{"a machine": {"host": "slow"}}'])
def test_a_machine_is_measured_once_and_anew_where_the_file_is_damaged(monkeypatch, tmp_path, damaged):
    measured = []

    def measurements(device: torch.device, formats: tuple[str, ...]) -> dict[str, object]:
        names = [*(f"flops {name}" for name in ("float32", *formats)), "convolution", "bandwidth", "host"]
        return {name: lambda name=name: measured.append(name) or 1.0 for name in names}

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(replay, "_measurements", measurements)
    replay.state_file().parent.mkdir(parents=True)
    replay.state_file().write_text(damaged)
    for _ in range(2):
        found = replay.this_device(torch.device("cpu"), ("bfloat16",))
    assert (found.bandwidth, found.flops) == (1.0, {"float32": 1.0, "bfloat16": 1.0})
    assert measured == ["flops float32", "flops bfloat16", "convolution", "bandwidth", "host"]
    replay.this_device(torch.device("cpu"), ("float16",))
    assert measured[5:] == ["flops float16"]
