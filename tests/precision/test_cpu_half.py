"""precision=amp and bf16 on a CPU: what is slow in 16 bits there is measured, and stays in float32 on every rank."""

from itertools import product

import pytest
import torch

from drivetrain.parallel import Parallel
from drivetrain.precision import cpu_half
from drivetrain.precision.base import Amp, Bf16
from drivetrain.precision.cpu_half import Slowness
from tests.support.context import context

measure = cpu_half.measure  # before the tests' own stands in for it


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.drop = torch.nn.Dropout(0.5)
        self.small, self.large = torch.nn.Linear(8, 2), torch.nn.Linear(8, 64)

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x))).mean((2, 3))
        return self.large(x) @ self.large(x).T, self.small(x)


def test_the_largest_layer_of_each_kind_is_measured(monkeypatch):
    """Also where torch says that this CPU has float16: the flag is not asked."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    half, full = torch.bfloat16, torch.float32
    seconds = {("Conv2d", half): 50.0, ("Conv2d", full): 1.0, ("Linear", half): 3.0, ("Linear", full): 2.0}
    timed = []

    def fake(call, dtype):
        timed.append(call)
        return seconds[type(call.layer).__name__, dtype]

    monkeypatch.setattr(cpu_half.LayerCall, "seconds", fake)
    monkeypatch.setattr(cpu_half, "_measured", {})
    model = Net()
    assert measure(model, torch.zeros(2, 3, 8, 8), torch.bfloat16) == Slowness(50.0, 1.5)
    assert {call.layer for call in timed} == {model.conv, model.large}
    for call in timed:
        assert call.work() >= cpu_half.MIN_WORK // 2
    assert next(c.x.shape[1:] for c in timed if c.layer is model.conv) == (3, 8, 8)
    count = len(timed)
    measure(model, torch.zeros(2, 3, 8, 8), torch.bfloat16)
    assert len(timed) == count  # once in a process


def test_what_another_look_could_answer_otherwise_is_looked_at_once_on_a_machine(monkeypatch):
    """Near the limit a second run would else compute in another format: it had other losses, and so had a resumed one."""
    slowness = iter([1.9, 1.0, 2.1, 1.0])
    monkeypatch.setattr(cpu_half.LayerCall, "seconds", lambda call, dtype: next(slowness))
    found = []
    for _ in range(2):
        monkeypatch.setattr(cpu_half, "_measured", {})  # as in another process
        found.append(measure(torch.nn.Linear(7, 3), torch.zeros(2, 7), torch.bfloat16).matrices)
    assert found == [1.9, 1.9]
    monkeypatch.setattr(cpu_half, "_measured", {})
    monkeypatch.setattr(cpu_half, "processor", lambda: "another")
    assert measure(torch.nn.Linear(7, 3), torch.zeros(2, 7), torch.bfloat16).matrices == 2.1


def test_measuring_leaves_the_model_and_the_process_as_they_were(monkeypatch):
    monkeypatch.setattr(cpu_half, "_measured", {})
    monkeypatch.setattr(cpu_half, "MIN_WORK", 1 << 12)
    monkeypatch.setattr(cpu_half, "ENOUGH_S", 1e-4)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    slowness = measure(model, torch.zeros(2, 3, 8, 8), torch.bfloat16)
    assert slowness.convolutions > 0
    assert slowness.matrices > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_without_layers_of_its_own_is_measured_by_a_usual_one(monkeypatch):
    monkeypatch.setattr(cpu_half, "_measured", {})
    monkeypatch.setattr(cpu_half.LayerCall, "seconds", lambda call, dtype: 9.0 if dtype == torch.float16 else 1.0)
    assert measure(torch.nn.Flatten(), torch.zeros(2, 3), torch.float16) == Slowness(9.0, 9.0)


@pytest.mark.parametrize(("option", "convolutions", "matrices"), product((Amp, Bf16), (1.2, 50.0), (1.2, 50.0)))
def test_only_what_is_fast_is_in_16_bits(monkeypatch, option, convolutions, matrices):
    """A Sapphire Rapids has float16 convolutions by its flag, and their backward takes 50 times as long."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)
    monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: Slowness(convolutions, matrices))
    precision, model, x = option(), Net(), torch.randn(2, 3, 8, 8)
    precision.setup(context())
    model = precision.convert(model, x)
    with precision.autocast():
        convolved = model.conv(x)
        product_, _ = model(x)
    dtype = {True: precision._dtype, False: torch.float32}
    assert convolved.dtype == dtype[convolutions < 2 and matrices < 2]
    assert product_.dtype == dtype[matrices < 2]
    assert precision.autocast_dtype() == (precision.dtype if matrices < 2 else None)  # the MFU's number format
    assert precision.gathered_dtype() == (precision.dtype if convolutions < 2 and matrices < 2 else None)
    convolved.float().sum().backward()
    assert model.conv.weight.grad.dtype == torch.float32


class TwoRanks(Parallel):
    """This rank, and one on a slower CPU, which is rank 1."""

    def gather_object(self, value):
        return [value, Slowness(50.0, 1.0)]


def test_what_is_slow_for_one_rank_is_in_float32_on_all(monkeypatch):
    monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: Slowness(1.0, 1.0))
    precision, x = Amp(), torch.randn(2, 3, 8, 8)
    precision.setup(context(parallel=TwoRanks()))
    model = precision.convert(Net(), x)
    with precision.autocast():
        assert model.conv(x).dtype == torch.float32
        assert model.small(torch.randn(2, 8)).dtype == torch.float16


def test_a_run_says_what_stays_in_float32(monkeypatch, make, caplog):
    monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: Slowness(1.0, 14.0))
    make("precision=amp")
    assert any("everything stays in float32: on this CPU float16 takes 14 times as long" in line for line in caplog.messages)
    make("precision=bf16")
    assert any("everything stays in float32: on this CPU bfloat16 takes 14 times as long" in line for line in caplog.messages)


@pytest.mark.parametrize("option", [Amp, Bf16])
def test_a_run_that_goes_on_says_that_other_layers_are_in_16_bits_now(monkeypatch, caplog, option):
    def precision(matrices):
        monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: Slowness(1.0, matrices))
        made = option()
        made.setup(context())
        made.convert(Net(), torch.randn(2, 3, 8, 8))
        return made

    state = precision(1.0).state_dict()
    precision(1.2).load_state_dict(state)
    assert not caplog.messages
    precision(9.0).load_state_dict(state)
    assert "computes everything in float32, and the one that wrote the checkpoint nothing" in caplog.messages[-1]
