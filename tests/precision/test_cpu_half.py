"""precision=amp and bf16 on a CPU: what is slow in 16 bits there is measured, and stays in float32 on every rank."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.core.machine import torch_patches
from drivetrain.core.machine.torch_patches import wide_convolutions
from drivetrain.parallel import Parallel
from drivetrain.precision import cpu_half
from drivetrain.precision.base import Amp, Bf16, Precision
from drivetrain.precision.bf16_pure import Bf16Pure
from tests.support.context import context

measure = cpu_half.measure  # before the tests' own stands in for it


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for left in range(torch_patches._users):  # by tests whose contexts do not end
        for place in () if left else (torch, torch.nn.functional):
            for name in torch_patches.CONVOLUTIONS:
                if hasattr(found := getattr(place, name, None), "__wrapped__"):
                    monkeypatch.setattr(place, name, found.__wrapped__)
    monkeypatch.setattr(torch_patches, "_users", 0)


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


def test_the_largest_linear_layer_is_measured(monkeypatch):
    seconds, timed = {torch.bfloat16: 3.0, torch.float32: 2.0}, []

    def fake(call, dtype):
        timed.append(call)
        return seconds[dtype]

    monkeypatch.setattr(cpu_half.LayerCall, "seconds", fake)
    monkeypatch.setattr(cpu_half, "_measured", {})
    model = Net()
    assert measure(model, torch.zeros(2, 3, 8, 8), torch.bfloat16) == 1.5
    assert {call.layer for call in timed} == {model.large}
    assert all(call.work() >= cpu_half.MIN_WORK // 2 for call in timed)
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
        found.append(measure(torch.nn.Linear(7, 3), torch.zeros(2, 7), torch.bfloat16))
    assert found == [1.9, 1.9]
    monkeypatch.setattr(cpu_half, "_measured", {})
    monkeypatch.setattr(cpu_half, "processor", lambda: "another")
    assert measure(torch.nn.Linear(7, 3), torch.zeros(2, 7), torch.bfloat16) == 2.1


def test_measuring_leaves_the_model_and_the_process_as_they_were(monkeypatch):
    monkeypatch.setattr(cpu_half, "_measured", {})
    monkeypatch.setattr(cpu_half, "MIN_WORK", 1 << 12)
    monkeypatch.setattr(cpu_half, "ENOUGH_S", 1e-4)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    assert measure(model, torch.zeros(2, 3, 8, 8), torch.bfloat16) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_without_layers_of_its_own_is_measured_by_a_usual_one(monkeypatch):
    monkeypatch.setattr(cpu_half, "_measured", {})
    monkeypatch.setattr(cpu_half.LayerCall, "seconds", lambda call, dtype: 9.0 if dtype == torch.float16 else 1.0)
    assert measure(torch.nn.Flatten(), torch.zeros(2, 3), torch.float16) == 9.0


@pytest.mark.parametrize(("option", "slowness"), product((Amp, Bf16), (1.2, 50.0)))
def test_only_what_is_fast_is_in_16_bits(monkeypatch, option, slowness):
    monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: slowness)
    precision, model, x, made = option(), Net(), torch.randn(2, 3, 8, 8), context()
    precision.setup(made)
    model = precision.convert(model, x)
    with precision.autocast():
        convolved = model.conv(x)
        product_, _ = model(x)
    made.on_exit.close()
    assert convolved.dtype == torch.float32
    assert product_.dtype == (precision._dtype if slowness < 2 else torch.float32)
    assert precision.autocast_dtype() == (precision.dtype if slowness < 2 else None)  # the MFU's number format
    assert precision.gathered_dtype() is None


def computed_in(calls):
    """The dtypes of the convolutions that run while `calls` does, forward and backward."""
    found = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "convolution" in op.name() or "conv_" in op.name():
                found.append((op.name(), {a.dtype for a in args if isinstance(a, torch.Tensor)}))
            return op(*args, **(kwargs or {}))

    with Look():
        calls()
    return found


@pytest.mark.parametrize("option", [Bf16, Amp, Bf16Pure])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_convolution_computes_in_16_bits_on_a_cpu(option, transposed, n):
    """Neither a module's nor a function's, forward or backward: oneDNN's gradients there depend on what freed memory held."""
    name = f"conv_transpose{n}d" if transposed else f"conv{n}d"
    layer = getattr(torch.nn, f"Conv{'Transpose' if transposed else ''}{n}d")(4, 4, 3, padding=1)
    own, precision, made = getattr(torch.nn.functional, name), option(), context()
    precision.setup(made)
    half = torch.bfloat16 if option is Bf16Pure else torch.float32
    layer.to(half)
    for call in (
        layer,
        lambda x: getattr(torch.nn.functional, name)(x, layer.weight),
        lambda x: getattr(torch, name)(x, layer.weight),
    ):

        def step(call=call):
            x = torch.randn(2, 4, *(5,) * n, dtype=half, requires_grad=True)
            with precision.autocast():
                out = call(x)
            assert out.dtype == half  # the layers after it go on in the run's own format
            out.float().sum().backward()
            assert x.grad.dtype == half

        found = computed_in(step)
        assert len(found) == 2, found
        assert all(dtypes == {torch.float32} for _, dtypes in found), found
    made.on_exit.close()
    assert getattr(torch.nn.functional, name) is own
    assert getattr(torch, name) is own


def test_a_kernel_larger_than_the_volume_computes_in_float64():
    """In float32 oneDNN's gradient is wrong there with AVX-512."""
    precision, made = Precision(), context()
    precision.setup(made)
    layer, x = torch.nn.Conv3d(3, 4, 7, 2, 3), torch.randn(2, 3, 5, 4, 4)
    found = computed_in(lambda: layer(x).sum().backward())
    assert [dtypes for _, dtypes in found] == [{torch.float64}] * 2
    assert layer.weight.grad.dtype == torch.float32
    assert all(dtypes == {torch.float32} for _, dtypes in computed_in(lambda: layer(torch.randn(2, 3, 8, 8, 8)).sum().backward()))
    made.on_exit.close()


def test_runs_of_one_process_may_end_in_any_order():
    own = torch.nn.functional.conv2d
    first, second = (wide_convolutions(torch.device("cpu")) for _ in range(2))
    first.__enter__(), second.__enter__(), first.__exit__(None, None, None)
    assert torch.nn.functional.conv2d is not own
    second.__exit__(None, None, None)
    assert torch.nn.functional.conv2d is own


class TwoRanks(Parallel):
    """This rank, and one on a slower CPU, which is rank 1."""

    def gather_object(self, value):
        return [value, 50.0]


def test_what_is_slow_for_one_rank_is_in_float32_on_all(monkeypatch):
    monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: 1.0)
    precision, x = Amp(), torch.randn(2, 3, 8, 8)
    precision.setup(context(parallel=TwoRanks()))
    model = precision.convert(Net(), x)
    with precision.autocast():
        assert model.conv(x).dtype == torch.float32
        assert model.small(torch.randn(2, 8)).dtype == torch.float32


def test_a_run_says_what_stays_in_float32(monkeypatch, make, caplog):
    monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: 14.0)
    make("precision=amp")
    assert any("everything stays in float32: on this CPU float16 takes 14 times as long" in line for line in caplog.messages)
    make("precision=bf16")
    assert any("everything stays in float32: on this CPU bfloat16 takes 14 times as long" in line for line in caplog.messages)


@pytest.mark.parametrize("option", [Amp, Bf16])
def test_a_run_that_goes_on_says_that_other_layers_are_in_16_bits_now(monkeypatch, caplog, option):
    def precision(matrices):
        monkeypatch.setattr(cpu_half, "measure", lambda model, example, dtype: matrices)
        made = option()
        made.setup(context())
        made.convert(Net(), torch.randn(2, 3, 8, 8))
        return made

    state = precision(1.0).state_dict()
    precision(1.2).load_state_dict(state)
    assert not any("this machine" in line for line in caplog.messages)
    precision(9.0).load_state_dict(state)
    assert "computes everything in float32, and the one that wrote the checkpoint convolutions" in caplog.messages[-1]
