"""What changes weights, on devices that are not there: fake tensors catch a mix of devices, and each read by the host."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.config.compose import compose
from drivetrain.config.validate import validate

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
devices = pytest.mark.parametrize("device", ["cuda:0", pytest.param("lazy:0", marks=pytest.mark.slow)])
BESIDE = {"schedulefree": ["scheduler=constant"]}
READS = {"adafactor", "lbfgs"}  # torch's implementations read values back




def model_on(device: str) -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 70), nn.Linear(70, 70))


def give_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)




@pytest.mark.parametrize("name", ["lamb", "nvlamb", "schedulefree"])
def test_an_update_without_float64_where_the_device_has_none(monkeypatch, name):
    """As on MPS, of which this torch has no fake tensors."""

    class NoFloat64(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = tree_leaves(out := func(*args, **(kwargs or {})))
            assert not any(t.dtype is torch.float64 for t in results if isinstance(t, torch.Tensor))
            return out

    for module in ("lamb", "flat_optimizer"):
        where = f"drivetrain.optimizer.algorithms.{module}.sum_dtype"
        monkeypatch.setattr(where, lambda device: torch.float32, raising=False)
    model = model_on("cpu")
    words = BESIDE.get(name, ["optimizer.fused=false"])  # as there is no fused one on MPS
    option = validate(compose([f"optimizer={name}", *words])).optimizer
    with NoFloat64():
        optimizer = option.create(model)
        give_gradients(model)
        for lr in (0.0, 0.1):  # a warm-up begins at 0
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["muon", "nvlamb"])
def test_an_optimizer_updates_a_model_that_lies_on_two_devices(name):
    """As parallel=split puts it: what is computed of several parameters at once is computed on each device."""
    option = validate(compose([f"optimizer={name}"])).optimizer
    with FakeTensorMode():
        first, second = (model_on(f"cuda:{i}") for i in range(2))
        model = nn.ModuleList([first, second])
        optimizer = option.create(model)
        give_gradients(model)
        optimizer.step()
        assert {p.device for p in model.parameters()} == {torch.device("cuda:0"), torch.device("cuda:1")}


@pytest.mark.parametrize("fused", [True, False])
def test_step_counters_of_a_checkpoint_are_loaded_to_where_this_run_needs_them(fused):
    """torch's fused kernels take them on the device, and the others on the CPU, whatever the run that saved them had."""
    from drivetrain.saving.checkpoint_io import load_optimizer

    saved = {"adamw": [], "muon": []}
    for name in saved:
        with FakeTensorMode(allow_non_fake_inputs=True):
            before, after = (
                validate(compose([f"optimizer={name}", f"optimizer.fused={str(value).lower()}"])).optimizer.create(model_on(at))
                for value, at in ((not fused, "cpu"), (fused, "cuda:0"))
            )
            for p in (p for group in before.param_groups for p in group["params"]):
                p.grad = torch.zeros_like(p)
            before.step()
            load_optimizer(after, before.state_dict())
            for member in getattr(after, "members", [after]):
                saved[name] += [state["step"].device.type for state in member.state.values() if "step" in state]
        assert set(saved[name]) == {"cuda" if fused else "cpu"}
