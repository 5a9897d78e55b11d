"""Memory over ranks, the roofline and devices, on made-up figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drivetrain.engine.rehearsal import GRADIENTS, OTHER, PARAMETERS, STATE, Operation
from drivetrain.measure.forecast import forecast, replay
from drivetrain.measure.forecast.forecast import Ranks
from drivetrain.measure.forecast.replay import _TABLE, FORECAST_ONLY, NOTHING, ONE, Device, Figure, Timed, known

KINDS = ("product", "convolution", "attention", "bandwidth")
# A device of 1 TFLOP/s and 1 GB/s, whose host takes no time.
DEVICE = Device(
    "made up", 1e9, {"float32": 1e12}, 1e9, 1e9, "a test", efficiency=dict.fromkeys(KINDS, ONE),
    kernel_s=NOTHING, host_s=NOTHING, view_s=NOTHING,
)  # fmt: skip
PARTS = {PARAMETERS: 800, GRADIENTS: 800, STATE: 1600, OTHER: 1000, "batch": 100}


def operations(*made: tuple[str, int, int], phase: str = "forward", times: int = 1) -> dict[Operation, int]:
    """Operations of these kinds, FLOP and bytes, each so many times."""
    sum_ = torch.ops.aten.mm.default, (), {}
    return {
        Operation(f"{phase} {number}", kind, phase, flops, nbytes, 0, torch.float32, sum_): times  # type: ignore[arg-type]
        for number, (kind, flops, nbytes) in enumerate(made)
    }


PRODUCT, LARGE = ("product", 10**12, 0), ("product", 10**13, 0)


def seconds(made: dict[Operation, int], device: Device = DEVICE, **more: object) -> float:
    return replay.step_time(made, {}, device, **more).seconds.value  # type: ignore[arg-type]


def test_an_operation_takes_as_long_as_its_arithmetic_or_its_traffic():
    assert seconds(operations(("product", 2 * 10**12, 0))) == 2.0
    assert seconds(operations(("product", 10**12, 3 * 10**9))) == 3.0
    assert seconds(operations(PRODUCT, ("view", 0, 10**12), times=4)) == 4.0
    found = replay.step_time(operations(PRODUCT, ("pointwise", 0, 3 * 10**9)), {}, DEVICE)
    assert found.shares == {"compute": 0.25, "memory bandwidth": 0.75}
    assert found.timed_share == 0


def test_what_was_measured_here_counts_in_place_of_the_roofline():
    found = replay.step_time(operations(LARGE, ("product", 10**12, 0), times=2), {"forward 0": Timed(0.5, 7)}, DEVICE)
    assert found.seconds.value == 3.0
    assert found.timed_share == pytest.approx(1 / 3)
    assert (found.forward_s, found.backward_s) == (3.0, 0.0)


def test_a_step_of_small_operations_is_limited_by_the_launch():
    slow_host = replace(DEVICE, host_s=Figure(0.1, 0.05, 0.2))
    found = replay.step_time(operations(("product", 10**9, 0), times=10), {}, slow_host)
    assert found.seconds == pytest.approx((1.0, 0.5, 2.0))
    assert found.shares == {"launch": 1.0}
    waits = replace(slow_host, asynchronous=False)  # on a CPU nothing is queued: both take their time
    assert seconds(operations(PRODUCT), waits) == pytest.approx(1.1)


def test_the_least_and_the_most_time_go_by_the_highest_and_the_lowest_efficiency():
    device = replace(DEVICE, efficiency={"product": Figure(0.5, 0.25, 1.0), "bandwidth": Figure(0.5, 0.1, 1.0)})
    assert replay.step_time(operations(("product", 10**12, 10**8)), {}, device).seconds == (2.0, 1.0, 4.0)
    assert replay.step_time(operations(("pointwise", 0, 10**9)), {}, device).seconds == (2.0, 1.0, 10.0)


def test_compiling_saves_traffic_of_pointwise_operations_alone():
    compiled = replay.Compiled(Figure.exactly(0.5))
    made = operations(("pointwise", 0, 10**9), ("product", 0, 10**9)) | operations(("pointwise", 0, 10**9), phase="update")
    assert seconds(made, compiled=compiled) == 2.5


def test_tensor_cores_compute_float32_where_tf32_is_on():
    device = replace(DEVICE, flops={"float32": 1e12, "tf32": 1e13})
    assert seconds(operations(LARGE), device) == 10.0
    assert seconds(operations(LARGE), device, tf32=True) == 1.0


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_fsdp_divides_what_the_ranks_share(ranks: int):
    found = forecast.sharded(PARTS, Ranks(ranks, ranks, largest_block=0.0))
    assert found == {PARAMETERS: 800 / ranks, GRADIENTS: 800 / ranks, STATE: 1600 / ranks, OTHER: 1000, "batch": 100}


def test_fsdp_gathers_two_blocks_or_keeps_all():
    assert forecast.sharded(PARTS, Ranks(4, 4, largest_block=100.0))[PARAMETERS] == 200 + 2 * 100
    assert forecast.sharded(PARTS, Ranks(4, 4, keeps_gathered=True, largest_block=100.0))[PARAMETERS] == 200 + 800
    assert forecast.sharded(PARTS, Ranks(4, 4, whole_gradients=True))[GRADIENTS] == 800
    assert forecast.sharded(PARTS, Ranks(4)) == PARTS  # ddp


def test_what_is_offloaded_is_not_on_the_device():
    found = forecast.sharded(PARTS, Ranks(4, 4, offloaded=True, largest_block=100.0))
    assert found == {PARAMETERS: 200, GRADIENTS: 100, STATE: 0, OTHER: 1000, "batch": 100}
    assert forecast.sharded(PARTS, Ranks(1, 1, offloaded=True))[STATE] == 0


def test_a_short_run_has_a_time():
    assert [forecast.seconds(s) for s in (0.004, 0.25, 1.0, 75.0)] == ["4 ms", "250 ms", "1.0 s", "75 s"]


def test_bytes_that_ranks_send():
    assert forecast.sent_bytes(800.0, Ranks(), 1) == 0
    assert forecast.sent_bytes(800.0, Ranks(4), 3) == 2 * 0.75 * 800  # one all-reduce, whatever the micro-batches
    assert forecast.sent_bytes(800.0, Ranks(4, 4), 1) == 3 * 0.75 * 800  # gathered twice, reduced once
    assert forecast.sent_bytes(800.0, Ranks(4, 4, keeps_gathered=True), 1) == 2 * 0.75 * 800


def test_the_peak_has_kernels_own_buffers_where_they_were_measured_else_an_allowance():
    counted = dict.fromkeys(PARTS, 1000)
    device = replace(DEVICE, reserved=NOTHING, fragmentation=ONE)
    parts, measured = forecast.peak_memory(counted, 6000, True, Ranks(), device)
    assert parts["workspace"] == 1000
    assert measured == (6000, 0.97 * 5000 + 1000, 1.04 * 5000 + 1000)
    parts, allowed = forecast.peak_memory(counted, 6000, False, Ranks(), device)
    assert parts["workspace"] == 0.05 * 1000
    assert allowed.low < measured.low
    assert allowed.high - allowed.low > measured.high - measured.low


def test_network_time_hides_behind_the_backward():
    nothing_hidden = replay.network_seconds(0.7e9, DEVICE, 0.0)
    assert nothing_hidden.value == nothing_hidden.high == pytest.approx(1.0)
    hidden = replay.network_seconds(0.7e9, DEVICE, 10.0)
    assert hidden.value == hidden.low == 0.0
    assert hidden.high == pytest.approx(1.0)


def test_figures_add_with_their_intervals():
    assert (Figure(1, 0, 2) + Figure(2, 2, 3)).times(3) == (9, 6, 15)
    assert Figure(1, 0.5, 2).times(Figure(10, 10, 20)) == (10, 5, 40)
    assert Figure(1, 0, 2).at_least(Figure(0, 1, 3)) == (1, 1, 3)


@pytest.mark.parametrize("name", list(_TABLE))
def test_every_device_of_the_table_says_that_it_was_not_measured(name: str):
    device = known(name)
    assert FORECAST_ONLY in device.source
    assert device.flops["float32"] > 1e12
    assert device.memory >= 16e9
    assert device.bandwidth < 1e13
    assert device.link <= device.bandwidth


def test_this_machine_is_looked_at_once(monkeypatch):
    monkeypatch.setattr(replay, "_convolution_flops", lambda device: 5e11)
    monkeypatch.setattr(replay, "_host_seconds", lambda device: 1e-5)
    monkeypatch.setattr(replay, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(replay, "_products", lambda device, number: {"float32": 1e12, "bfloat16": 4e12}[number])
    found = replay.this_device(torch.device("cpu"), ("bfloat16",))
    assert (found.bandwidth, found.flops, found.host_s.value) == (1e10, {"float32": 1e12, "bfloat16": 4e12}, 1e-5)
    assert found.efficiency["convolution"] == (0.5, 0.25, 0.75)
