"""Each patch of torch is needed still: a test that fails here says that its patch can go."""

import contextlib
import copy
import inspect
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import checkpoint

from drivetrain.core.machine import torch_patches
from drivetrain.core.step.modules import put_in_place, taken_over


def test_torch_has_no_hook_around_a_forward():
    known = {
        "register_backward_hook", "register_buffer", "register_forward_hook", "register_forward_pre_hook",
        "register_full_backward_hook", "register_full_backward_pre_hook", "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook", "register_module", "register_parameter", "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
    }  # fmt: skip
    assert {name for name in dir(nn.Module) if name.startswith("register_")} <= known


def test_a_wrapped_forward_is_undone_to_the_one_before():
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    names, plain = list(layer.state_dict()), layer(x)
    outer = torch_patches.wrap_forward(layer, lambda forward: lambda x: 2 * forward(x))
    inner = torch_patches.wrap_forward(layer, lambda forward: lambda x: 1 + forward(x))
    assert torch.equal(layer(x), 2 * plain + 1)
    assert list(layer.state_dict()) == names
    inner()
    assert torch.equal(layer(x), 2 * plain)
    outer()
    assert "forward" not in vars(layer)


def test_torch_gives_fake_tensors_no_address():
    with FakeTensorMode():
        whole, other = torch.zeros(4), torch.zeros(4)
    own = FakeTensor.data_ptr
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")  # torch deprecates it, and some releases refuse it
        assert whole.data_ptr() == other.data_ptr()
    with torch_patches.fake_addresses(lambda tensor: int(tensor.storage_offset())):
        assert whole[1:].data_ptr() == 1
    assert FakeTensor.data_ptr is own


def test_hooks_of_steps_run_though_the_wrappers_are_removed():
    """torch's own wrapper runs them: those of all optimizers, and those of one, registered whenever."""
    called = []
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    torch_patches.remove_step_wrappers(optimizer)
    weight.grad = torch.ones(2)
    optimizer.step()
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("before all")),
        optimizer.register_step_post_hook(lambda *_: called.append("after this")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert called == ["before all", "after this"]
    assert weight.tolist() == [-2.0, -2.0]


@pytest.mark.slow
def test_torch_imports_its_compiler_for_an_optimizer():
    code = "import sys, torch\ntorch.optim.SGD([torch.zeros(1)], lr=1.0)\nprint('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_torch_wraps_the_step_of_an_optimizer():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    assert inspect.unwrap(type(optimizer).step) is not type(optimizer).step


def test_torch_has_no_hook_around_the_state_of_an_optimizer_that_extends_it():
    class Extends(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "done": [*done, "its own part"]}

    done = []
    optimizer = Extends([nn.Parameter(torch.zeros(1))])
    optimizer.register_state_dict_post_hook(lambda *_: done.append("the hook after it"))
    assert optimizer.state_dict()["done"] == ["the hook after it", "its own part"]


def test_selective_checkpointing_does_not_pass_over_profiler_ranges():
    assert "_record_function_enter_new" not in inspect.getsource(checkpoint)


def test_make_fx_does_not_say_that_it_compiles():
    def said(x: torch.Tensor) -> torch.Tensor:
        found.append(torch.compiler.is_compiling())
        return x + 1

    found: list[bool] = []
    make_fx(said)(torch.ones(1))
    with torch_patches.compiling():
        make_fx(said)(torch.ones(1))
    assert (found, torch.compiler.is_compiling()) == ([False, True], False)


# --- modules in the place of others ---


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_module_takes_the_place_of_another_wherever_the_model_holds_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    old = model[0]
    model[1].again = old
    model.listed, model.both = [old, "text"], (old,)
    model.__dict__["beside"] = old
    called: list[nn.Module] = []
    old.register_forward_hook(lambda module, *_: called.append(module))
    names = list(model.state_dict())
    new = taken_over(old, Doubled)
    put_in_place(model, [(old, new)])
    assert all(held is new for held in (model[0], model[1].again, model.listed[0], model.both[0], model.beside))
    assert list(model.state_dict()) == names
    assert new.weight is old.weight
    x = torch.ones(1, 2)
    assert torch.equal(new(x), 2 * old(x))
    assert called == [new, old]  # the hooks go along
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))
    assert copied[0] is copied.listed[0] is not new


def test_the_model_itself_is_not_replaced():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="target"):
        put_in_place(model, [(model, taken_over(model, Doubled))])
