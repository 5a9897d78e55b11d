"""The options' settings: the same common settings everywhere, and every setting that cannot be is refused with what to set."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import drivetrain
from drivetrain.config.catalog import content, option_files
from drivetrain.config.compose import compose
from drivetrain.config.validate import validate, validate_device
from drivetrain.core.errors import UserError
from drivetrain.core.user_code import import_name
from drivetrain.launch.job import prepare
from drivetrain.optimizer import flat, packages, torch_optim, torch_wrappers
from drivetrain.optimizer import muon as muon_options
from drivetrain.optimizer import timm as by_timm
from drivetrain.optimizer.muon import hidden_matrices
from drivetrain.saving.checkpoint_io import load_optimizer
from tests.support import stand_ins

FILES = [*option_files()["optimizer"].values()]


def problems(*words: str) -> list[str]:
    try:
        validate_device(validate(compose(words)))
    except UserError as error:
        return error.problems
    return []


APEX = {"apex_adam": "adamw", "apex_sgd": "sgd", "apex_lamb": "nvlamb", "apex_novograd": "novograd"}


REFUSED: list[tuple[list[str], str]] = [
    (["optimizer.lr=-1"], "optimizer.lr=-1: must be > 0"),
    (["optimizer.lr=0"], "optimizer.lr=0: must be > 0"),
    (["optimizer.lr=fast"], "optimizer.lr=fast"),
    (["optimizer.momentum=1.0"], "optimizer.momentum=1.0"),
    (["optimizer.weight_decay=-0.1"], "optimizer.weight_decay=-0.1"),
    (["optimizer.fused=true", "optimizer.foreach=true"], "exclude each other"),
    (["optimizer=sgd", "optimizer.momentum=0"], "set optimizer.momentum above 0 or optimizer.nesterov=false"),
    (["optimizer.lr_multipliers={head: fast}"], "head=fast: a multiplier of the learning rate must be a number > 0"),
    (["optimizer.lr_multipliers={head: 0}"], "must be a number > 0: to keep head as it is, set model.freeze=[head]"),
    (["optimizer.lr_multipliers={head: true}"], "must be a number > 0"),
    (["optimizer.lr_multipliers={head: 2, head.bias: 3}"], "head contains head.bias"),
    (["optimizer.layer_decay=1.5"], "must be ≤ 1"),
    (["optimizer.layer_decay=0"], "must be > 0"),
    (["optimizer.no_weight_decay=[1]"], "must be a text"),
    (["optimizer=adafactor", "optimizer.beta2_decay=0.8"], "must be ≤ 0"),
    (["optimizer=adafactor", "optimizer.d=0.5"], "must be ≥ 1"),
    (["optimizer=muon", "optimizer.scale=rms"], "must be one of 'original' or 'match_rms_adamw'"),
    (["optimizer=schedulefree", "scheduler=constant", "optimizer.beta1=0"], "must be > 0"),
    (["optimizer=schedulefree", "scheduler=onecycle"], "scheduler=onecycle lowers it: set scheduler=constant"),
    (["optimizer=nvlamb", "optimizer.max_grad_norm=0"], "must be > 0"),
    (["optimizer=lamb", "optimizer.beta2=1"], "must be < 1"),
    (["optimizer=lars", "optimizer.beta1=0.9"], "has it"),
    (["optimizer=lars", "optimizer.fused=true"], "optimizer=lars has no fused implementation: set optimizer.fused=null"),
    (["optimizer=lbfgs", "optimizer.weight_decay=0.1"], "set optimizer.weight_decay=0"),
    *(
        (["optimizer=lbfgs", word], f"optimizer=lbfgs and {word} exclude each other (it runs an update's")
        for word in ("precision=amp", "compile=step", "parallel=fsdp", "batch=auto")
    ),
    (["optimizer=timm", "optimizer.name=nadamv"], "did you mean 'nadam' or 'nadamw'"),
    (["optimizer=timm", "optimizer.name=adahessian"], "needs second derivatives"),
    (["optimizer=timm", "optimizer.name=fusedadam"], "set optimizer=apex_adam"),
    (["optimizer=timm", "optimizer.name=lamb", "optimizer.kwargs.trust_clp=true"], "did you mean 'trust_clip'?"),
    (["optimizer=timm", "optimizer.name=novograd", "optimizer.foreach=true"], "timm's novograd has no such implementation"),
    *(
        (
            [f"optimizer={name}"],
            f"optimizer={name} needs NVIDIA's apex, which is not installed (it is built from github.com/NVIDIA/apex): set "
            f"optimizer={other} instead",
        )
        for name, other in APEX.items()
    ),
]


def test_what_cannot_be_is_refused() -> None:
    for words, said in REFUSED:
        assert said in " ".join(problems(*words)), words


def test_what_can_be_is_taken() -> None:
    words = ("optimizer.fused=false", "optimizer.foreach=true", "scheduler=constant", "scheduler.warmup=0.1")
    for name in ("lars", "schedulefree"):
        assert not problems(f"optimizer={name}", *words)


def test_timm_takes_its_arguments_and_our_groups() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    settings = by_timm.Timm(
        name="lamb", lr=0.1, weight_decay=0.3, lr_multipliers={"1": 2}, kwargs={"betas": [0.5, 0.6], "trust_clip": True}
    )
    optimizer = settings.create(model)
    assert type(optimizer).__module__ == "timm.optim.lamb"
    assert {(g["lr"], g["weight_decay"]) for g in optimizer.param_groups} == {(0.1, 0.3), (0.1, 0.0), (0.2, 0.3), (0.2, 0.0)}
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[0]["trust_clip"] is True
    assert by_timm.Timm(name="adamw").create(model).param_groups[0]["fused"] is True
    with pytest.raises(UserError, match=r"optimizer.name=lamb cannot be built"):
        by_timm.Timm(name="lamb", kwargs={"max_grad_norm": 1, "nonsense": 2}).create(model)


@pytest.mark.parametrize("name", APEX)
def test_apex_is_built_where_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of apex's signatures; the kernels themselves need its build and a GPU."""
    stand_ins.install("apex.optimizers", tmp_path, monkeypatch)
    words = [f"optimizer={name}", "optimizer.lr=0.5"]
    assert "runs on CUDA only" in problems(*words)[0]
    assert "has a fused implementation only" in problems(*words, "optimizer.fused=false")[0]
    assert "has no multi-tensor implementation" in problems(*words, "optimizer.foreach=true")[0]
    run = validate(compose(words))
    monkeypatch.setattr(run.runtime, "device_type", lambda: "cuda")
    assert not list(run.optimizer.validate_device(run))
    built = run.optimizer.create(torch.nn.Linear(3, 3))
    assert {g["lr"] for g in built.param_groups} == {0.5}
    assert {g["weight_decay"] for g in built.param_groups} == {run.optimizer.weight_decay, 0.0}


def test_apex_trains_saves_and_goes_on(train, tmp_path, monkeypatch):
    """A run with the stand-in, whose update is torch's, on this machine's CPU."""
    stand_ins.install("apex.optimizers", tmp_path, monkeypatch)
    monkeypatch.setattr(packages.Apex, "validate_device", lambda self, run: iter(()))
    length = ["epochs=9", "optimizer.lr=0.01"]
    part = train(*length, "optimizer=apex_adam", "updates=2")
    plain = train(*length, "optimizer=adamw", "optimizer.fused=false", "updates=4")
    gone_on = drivetrain.train([f"resume={part.run_dir}", "updates=4"])
    assert (gone_on.status, gone_on.updates) == ("completed", 4), gone_on.error
    end, again = ((Path(run.run_dir) / "checkpoints/4/model.safetensors").read_bytes() for run in (plain, gone_on))
    assert end == again


def test_muon_without_a_hidden_matrix_is_refused() -> None:
    with pytest.raises(UserError, match="finds no weight"):
        muon_options.Muon().create(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    with pytest.raises(UserError, match="finds no weight"):
        muon_options.Muon(adamw=["1", "2"]).create(model)
    with pytest.raises(UserError, match=r"optimizer.adamw: '9' matches no trainable parameter"):
        muon_options.Muon(adamw=["9"]).create(model)
    names = {p: n for n, p in model.named_parameters()}
    muon, adamw = muon_options.Muon(adamw=["1"]).create(model).members
    assert [names[p] for g in muon.param_groups for p in g["params"]] == ["2.weight"]
    assert len([p for g in adamw.param_groups for p in g["params"]]) == 7


def test_what_is_hidden_in_a_transformer() -> None:
    pytest.importorskip("timm")
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24, num_heads=2, num_classes=5)
    assert hidden_matrices(model) == {f"blocks.0.{n}.weight" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    torchs = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.TransformerEncoderLayer(8, 2, 16),
                                 torch.nn.Linear(8, 3))  # fmt: skip
    found = hidden_matrices(torchs)
    assert {"2.self_attn.in_proj_weight", "2.self_attn.out_proj.weight", "2.linear1.weight"} <= found
    assert not {"0.weight", "1.weight", "3.weight"} & found


def test_unset_forms_take_the_fastest() -> None:
    assert torch_optim.AdamW().implementation("cpu", 10**9) == "fused"
    assert torch_optim.AdamW(foreach=True).implementation("cuda", 10) == "foreach"
    assert torch_optim.AdamW(fused=False, foreach=False).implementation("cuda", 10) == "loop"
    assert torch_optim.RmsProp().implementation("cuda", 10**9) == "foreach"
    assert torch_optim.RmsProp().implementation("cpu", 10**4) == "foreach"
    assert torch_optim.RmsProp().implementation("cpu", 10**9) == "loop"  # measured: on a CPU many tensors leave the cache
    for option in (flat.Lars, flat.NovoGrad, flat.Lion, flat.ScheduleFree):
        assert option().implementation("cpu", 10**9) == "foreach"  # in chunks


def test_every_docstring_names_its_source() -> None:
    """A paper, or the library's class: the rules must be findable."""
    classes: list[Any] = [import_name(content(f)["_target_"]) for f in FILES]
    for cls in classes:
        assert re.search(r"\d{4}\)|torch\.optim|timm\.optim|apex\.optimizers|NVIDIA", cls.__doc__), cls


def test_of_a_recipes_values_only_those_that_hold_are_told():
    """Beside another optimizer from the command line, whose own values are given there too."""
    line, *_ = prepare(["recipe=stdlib_gpt", "optimizer=adamw"]).notices
    assert "optimizer.lr=0.02" in line
    assert "optimizer.adamw_lr" in line
    line, *_ = prepare(["recipe=stdlib_gpt", "optimizer=adamw", "optimizer.lr=0.004"]).notices
    assert "keeps" not in line
    assert "leaves out optimizer.adamw_lr" in line


def test_a_key_is_not_held_against_the_default_where_the_option_is_misspelt(problems):
    assert problems("parallel=pipelin", "parallel.stages=2") == [
        "parallel=pipelin is no option of parallel: did you mean 'pipeline'?"
    ]
    assert problems("augment=[mixupp]", "augment.mixup.alpha=1") == [
        "augment=mixupp is no option of augment: did you mean 'mixup'?"
    ]


def test_a_fused_kernel_is_looked_up_where_it_would_run():
    assert torch_optim.Sgd().has_fused("cpu")
    assert torch_optim.AdamW().has_fused("cuda")
    assert not torch_optim.RmsProp().has_fused("cuda"), "torch has none"
    assert not torch_optim.AdamW().has_fused("lazy"), "a device without such kernels"


@pytest.mark.parametrize(
    "option", [torch_optim.Adagrad(), muon_options.Muon(), by_timm.Timm(name="adamw"), by_timm.Timm(name="adagrad")]
)
def test_a_kernel_is_not_used_where_the_class_refuses_it(monkeypatch, option):
    """As torch 2.11's Adagrad refuses the one for CUDA, which is there, in its first update."""
    name = option.torch_name
    module = inspect.getmodule(getattr(torch.optim, name)._init_group)
    genuine = functools.partial(module._device_dtype_check_for_fused, cuda_unsupported=True)
    monkeypatch.setattr(module, "_device_dtype_check_for_fused", lambda p, **_: genuine(p))
    torch_wrappers.has_fused.cache_clear()
    try:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::_fused_{name.lower()}_", "CUDA")
        assert not option.has_fused("cuda")
        assert option.implementation("cuda", 100) == "foreach"
        assert option.has_fused("cpu")
    finally:
        torch_wrappers.has_fused.cache_clear()


# --- what changes weights, on devices that are not there: fake tensors catch a mix of devices, and each read by the host ---


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

    for module in ("layerwise_optimizer", "flat_optimizer"):
        where = f"drivetrain.optimizer.algorithms.{module}.sum_dtype"
        monkeypatch.setattr(where, lambda device: torch.float32)
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
