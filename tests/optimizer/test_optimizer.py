"""Optimizers in whole runs: their parameter groups, the weights that are saved, and those that run an update themselves."""

import copy
import functools
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.config.catalog import content, option_files
from drivetrain.config.compose import compose
from drivetrain.config.validate import machine_local_keys, validate, validate_device
from drivetrain.core.errors import UserError
from drivetrain.core.user.code import import_name
from drivetrain.engine.evaluator import Evaluator
from drivetrain.engine.trainer import Trainer
from drivetrain.launch.job import prepare
from drivetrain.model.nets import Mlp, ResNet9
from drivetrain.optimizer import Optimizer, flat, packages, torch_optim, torch_wrappers
from drivetrain.optimizer import muon as muon_options
from drivetrain.optimizer import timm as by_timm
from drivetrain.optimizer.algorithms.flat_optimizer import ScheduleFree
from drivetrain.optimizer.closures import Sam
from drivetrain.optimizer.groups import layer_decay_factors
from drivetrain.recipe.reader import read
from drivetrain.run.identity import config_hash
from drivetrain.run.recipe_file import to_recipe
from drivetrain.run.result import Result
from drivetrain.saving import sharded_checkpoint
from drivetrain.saving.checkpoint_io import load_optimizer
from drivetrain.scheduler.curves import Cosine
from tests.support import stand_ins
from tests.support.command import checkpoints, tensors
from tests.support.refusals import problems_of
from tests.support.to_end import continued, run_to_end

# --- whole runs: every optimizer learns the digits, and what is evaluated, saved and resumed are the right weights ---


RATES: dict[str, list[str]] = {
    "sgd": [], "adam": [], "adamw": [], "rmsprop": [], "adagrad": [], "adafactor": [], "lars": ["optimizer.lr=1"],
    "lamb": [], "nvlamb": [], "novograd": [], "muon": [], "lion": [], "schedulefree": ["scheduler=constant"],
    "shampoo": [], "soap": [], "timm": [], "sparse_adam": [],
}  # fmt: skip


def short(names: Iterable[str], *normal: str) -> list[Any]:
    """All of the names; those that are not `normal` are slow tests."""
    return [name if name in normal else pytest.param(name, marks=pytest.mark.slow) for name in names]


def run(out: Path, *words: str, epochs: int = 5) -> Result:
    fixed = ["model=mlp", f"epochs={epochs}", f"output_dir={out}", "runtime.threads=1"]
    return run_to_end([*fixed, *words])


@pytest.mark.parametrize("name", short(RATES, "adamw", "timm"))
def test_learns_the_digits(name: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"optimizer={name}", *RATES[name])
    assert result.judged("final")["accuracy"] > 0.85  # chance is 0.1


def test_schedulefree_evaluates_and_saves_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    metrics, fit = Evaluator.metrics, Trainer.fit

    def watched(evaluator: Evaluator, **settings: Any) -> dict[str, float]:
        seen["evaluated"] = [p.detach().clone() for p in evaluator.model.parameters()]
        return metrics(evaluator, **settings)

    def ended(trainer: Trainer, stop: Any) -> None:
        fit(trainer, stop)
        seen["trained"] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        seen["optimizer"], seen["model"] = trainer.optimizer, trainer.model

    monkeypatch.setattr(Evaluator, "metrics", watched)
    monkeypatch.setattr(Trainer, "fit", ended)
    result = run(tmp_path, "optimizer=schedulefree", "scheduler=constant", epochs=2)
    saved = tensors(result)
    assert isinstance(seen["optimizer"], ScheduleFree)
    assert all(torch.equal(p, saved[n]) for p, n in zip(seen["evaluated"], seen["trained"], strict=True))
    assert any(not torch.equal(saved[n], p) for n, p in seen["trained"].items())
    kept = torch.load(checkpoints(Path(result.run_dir))[-1] / "state.pt", weights_only=True)["optimizer"]["state"]
    assert kept.keys() == seen["trained"].keys()
    assert all(torch.equal(kept[name]["y"], trained) for name, trained in seen["trained"].items())


# --- who decays, at which multiple of the learning rate ---


def by_name(model: torch.nn.Module, settings: Any) -> dict[str, tuple[float, float]]:
    """Parameter's name → (lr, weight_decay)."""
    names = {p: n for n, p in model.named_parameters()}
    groups = settings.create(model).param_groups
    found = {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(found) == sum(len(g["params"]) for g in groups)  # each once
    return found


def mlp() -> Mlp:
    return Mlp((4,), 3, (5, 5, 5), 0.0)


def test_decay_is_off_for_norms_biases_and_listed_names() -> None:
    model = ResNet9((1, 8, 8), 10, 4, bias=True)
    plain = by_name(model, torch_optim.AdamW(lr=0.1, weight_decay=0.5))
    assert {n for n, (_, decay) in plain.items() if decay} == {n for n, p in model.named_parameters() if p.ndim > 1}
    listed = by_name(model, torch_optim.AdamW(lr=0.1, weight_decay=0.5, no_weight_decay=["head", "features.0.?.weight"]))
    off = {n for n in plain if plain[n][1] and not listed[n][1]}
    assert off == {"head.weight", "features.0.0.weight"}
    everything = by_name(
        model, torch_optim.AdamW(lr=0.1, weight_decay=0.5, decay_norm_and_bias=True, no_weight_decay=["head.bias"])
    )
    assert {n for n, (_, decay) in everything.items() if not decay} == {"head.bias"}


def test_without_decay_there_is_one_group() -> None:
    assert len(torch_optim.Sgd(weight_decay=0.0).create(mlp()).param_groups) == 1
    assert len(torch_optim.Sgd(weight_decay=0.5).create(mlp()).param_groups) == 2


def test_the_models_own_list_is_followed() -> None:
    class Own(torch.nn.Linear):
        def no_weight_decay(self) -> set[str]:
            return {"weight"}

    assert by_name(Own(3, 3), torch_optim.Sgd(weight_decay=0.5))["weight"][1] == 0
    assert by_name(Own(3, 3), torch_optim.Sgd(weight_decay=0.5, decay_norm_and_bias=True))["weight"][1] == 0.5


def test_frozen_parameters_are_left_out() -> None:
    model = mlp()
    model.head.requires_grad_(False)
    assert not any(n.startswith("head") for n in by_name(model, flat.Lamb()))
    model.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        flat.Lamb().create(model)


def test_lr_of_multiplies_and_the_first_group_has_the_plain_rate() -> None:
    model = mlp()
    given = {"head": 10, "*.bias": 0.5, "layers": {"0": {"linear": {"weight": 3}}}}
    rates = {n: round(lr, 9) for n, (lr, _) in by_name(model, torch_optim.AdamW(lr=0.1, lr_multipliers=given)).items()}
    assert rates["layers.0.linear.weight"] == 0.3
    assert rates["layers.1.linear.weight"] == 0.1
    assert rates["layers.1.linear.bias"] == 0.05
    assert rates["head.weight"] == 1.0
    assert rates["head.bias"] == 0.5  # both patterns
    assert torch_optim.AdamW(lr=0.1, lr_multipliers=given).create(model).param_groups[0]["lr"] == 0.1


def test_layer_decay_by_repeated_blocks() -> None:
    shares = layer_decay_factors(mlp(), 0.5)
    assert [shares[f"layers.{i}.linear.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert shares["head.bias"] == 1.0
    resnet = layer_decay_factors(ResNet9((1, 8, 8), 10, 4, bias=False), 0.5)
    assert resnet["head.weight"] == 1.0
    assert sorted(set(resnet.values())) == [0.125, 0.25, 0.5, 1.0]  # stem, two residuals, head
    assert resnet["features.0.0.weight"] == 0.125
    rates = by_name(mlp(), torch_optim.AdamW(lr=1.0, layer_decay=0.5, lr_multipliers={"head": 4}))
    assert rates["layers.0.linear.weight"][0] == 0.125
    assert rates["head.weight"][0] == 4.0


SWIN = {"img_size": 32, "window_size": 2, "embed_dim": 8, "depths": (1, 2), "num_heads": (1, 2)}


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("test_vit", {}),
        ("test_resnet", {}),
        ("test_convnext", {}),
        ("test_efficientnet", {}),
        ("swin_tiny_patch4_window7_224", SWIN),
    ],
)
def test_layer_decay_follows_the_forward_in_timms_families(name: str, kwargs: dict[str, Any]) -> None:
    """Groups are timm's, and the factors grow by a layer at a time from the input to the head, which has the whole rate."""
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_layer_decay

    model = timm.create_model(name, num_classes=5, **kwargs).eval()
    names = {p: n for n, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, 0.05, getattr(model, "no_weight_decay", set)(), layer_decay=0.5)
    theirs = {names[p]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert by_name(model, torch_optim.AdamW(lr=1.0, weight_decay=0.05, layer_decay=0.5)) == theirs
    factors = layer_decay_factors(model, 0.5)
    layers = len(set(factors.values()))
    assert layers > 4
    assert set(factors.values()) == {0.5**n for n in range(layers)}
    assert all(factors[n] == 1.0 for n in factors if n.startswith(f"{model.default_cfg['classifier']}."))
    called: list[float] = []
    for prefix, module in model.named_modules():
        own = [f"{prefix}.{n}" for n, _ in module.named_parameters(recurse=False)]
        if prefix and own:
            module.register_forward_pre_hook(lambda *_, own=own: called.extend(factors[n] for n in own))
    model(torch.randn(1, 3, *([32, 32] if kwargs else model.default_cfg["input_size"][1:])))
    assert called == sorted(called)


def test_patterns_without_effect_are_named() -> None:
    caught = problems_of(torch_optim.Sgd(no_weight_decay=["haed", "layers"], lr_multipliers={"layers.7": 2}).create, mlp())
    assert len(caught) == 2
    assert "optimizer.no_weight_decay: 'haed' matches no trainable parameter" in caught[0]
    assert "'head'" in caught[0]
    assert "optimizer.lr_multipliers: 'layers.7'" in caught[1]
    with pytest.raises(UserError, match=r"layer_decay=0.5 needs a model of several layers"):
        torch_optim.Sgd(layer_decay=0.5).create(torch.nn.Linear(3, 3))


def test_the_schedule_keeps_the_multiples() -> None:
    model = mlp()
    optimizer = flat.Lamb(lr=0.1, lr_multipliers={"head": 10}).create(model, lr_factor=2.0)
    schedule = Cosine()
    schedule.bind(optimizer, 10)
    schedule.step(5)
    rates = sorted({round(g["lr"], 9) for g in optimizer.param_groups})
    assert rates == [0.1, 1.0]  # half of 0.2, and ten times that
    assert all(isinstance(g["lr"], float) for g in optimizer.param_groups)


WORDS = [
    "optimizer=lamb",
    "optimizer.lr_multipliers={head.*: 10, layers.0: 0.5, *.bias: 2}",
    "optimizer.no_weight_decay=['layers.1']",
    "model=mlp",
]


def test_patterns_come_back_from_the_runs_own_recipe(tmp_path: Path) -> None:
    """A run writes recipe.yaml and is resumed from it: dots and stars in keys must survive."""
    first = compose(WORDS)
    run = validate(first)
    file = tmp_path / "recipe.yaml"
    file.write_text(to_recipe(first, machine_local_keys(run)))
    second = compose([], base=read(file))
    again = validate(second)
    assert config_hash(first, machine_local_keys(run)) == config_hash(second, machine_local_keys(again))
    model = Mlp((1, 8, 8), 10, (16, 16), 0.0)
    rates = by_name(model, again.optimizer)
    assert rates == by_name(model, run.optimizer)
    assert rates["head.weight"][0] == pytest.approx(10 * run.optimizer.lr)
    assert rates["head.bias"][0] == pytest.approx(20 * run.optimizer.lr)


def test_brackets_are_no_patterns() -> None:
    """A YAML of one's own could have them; the dotted keys of a recipe could not."""
    run = validate(compose([]))
    assert "no brackets" in next(torch_optim.Sgd(lr_multipliers={"head[0]": 2}).validate(run))


# --- optimizers that run an update's forward and backward themselves: L-BFGS and SAM against loops by hand ---


OPTIONS = {
    "lbfgs": ["optimizer=lbfgs", "optimizer.lr=0.5", "optimizer.max_iter=4"],
    "lbfgs, steps": ["optimizer=lbfgs", "optimizer.lr=0.1", "optimizer.line_search_fn=null", "optimizer.max_iter=3"],
    "sam": ["optimizer=sam", "optimizer.lr=0.1", "optimizer.rho=0.1"],
    "sam, adaptive": ["optimizer=sam", "optimizer.lr=0.1", "optimizer.rho=1.0", "optimizer.adaptive=true", "clip=norm"],
}
LINEAR = ["model=mlp", "model.hidden=[8]", "scheduler=constant", "updates=4", "epochs=4"]


def by_hand(model, name, batches):
    """The loop that torch's documentation, and the paper's authors, show; yields the loss of each update."""
    if name.startswith("lbfgs"):
        steps = name == "lbfgs, steps"
        lr, most, search = (0.1, 3, None) if steps else (0.5, 4, "strong_wolfe")
        optimizer = torch.optim.LBFGS(model.parameters(), lr, max_iter=most, history_size=10, line_search_fn=search)
        for batch in batches:

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = cross_entropy(model(batch.x), batch.y)
                loss.backward()
                return loss

            yield optimizer.step(closure).item()
        return
    adaptive = name == "sam, adaptive"
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 5e-4},
              {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True)
    for batch in batches:
        loss = cross_entropy(model(batch.x), batch.y)
        loss.backward()
        if adaptive:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        weights_after = [p.detach().clone() for p in model.parameters()]
        around = [p.abs() if adaptive else torch.ones_like(p) for p in weights_after]
        norm = torch.stack([(a * p.grad).norm() for a, p in zip(around, model.parameters(), strict=True)]).norm()
        with torch.no_grad():
            for a, p in zip(around, model.parameters(), strict=True):
                p.add_(a.square() * p.grad * (1.0 if adaptive else 0.1) / (norm + 1e-12))
        optimizer.zero_grad()
        cross_entropy(model(batch.x), batch.y).backward()
        if adaptive:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for p, w in zip(model.parameters(), weights_after, strict=True):
                p.copy_(w)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_is_the_loop_by_hand(make, name):
    trainer = make(*LINEAR, *OPTIONS[name], "log_every=1")
    model = copy.deepcopy(trainer.model)
    stream = trainer.read()
    losses = list(by_hand(model, name, (batch for batch, _ in zip(stream, range(4), strict=False))))
    trainer.fit()
    assert trainer.log.writers[0].losses == pytest.approx(losses, abs=1e-6)
    for trained, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained, theirs, atol=1e-5, rtol=1e-5)


def test_an_option_whose_optimizer_wants_a_closure_has_to_say_so():
    option = type("Silent", (Sam,), {"takes_closure": False})()
    with pytest.raises(UserError, match="Sam updates by a closure: set takes_closure = True in Silent"):
        option.create(torch.nn.Linear(2, 2))


# --- the options' settings: the same common settings everywhere, and every setting that cannot be is refused with what to set ---


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
    settings = by_timm.TimmOptimizer(
        name="lamb", lr=0.1, weight_decay=0.3, lr_multipliers={"1": 2}, kwargs={"betas": [0.5, 0.6], "trust_clip": True}
    )
    optimizer = settings.create(model)
    assert type(optimizer).__module__ == "timm.optim.lamb"
    assert {(g["lr"], g["weight_decay"]) for g in optimizer.param_groups} == {(0.1, 0.3), (0.1, 0.0), (0.2, 0.3), (0.2, 0.0)}
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[0]["trust_clip"] is True
    assert by_timm.TimmOptimizer(name="adamw").create(model).param_groups[0]["fused"] is True
    with pytest.raises(UserError, match=r"optimizer.name=lamb cannot be built"):
        by_timm.TimmOptimizer(name="lamb", kwargs={"max_grad_norm": 1, "nonsense": 2}).create(model)


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
    gone_on = continued(part.run_dir, "updates=4", updates=4)
    end, again = ((Path(run.run_dir) / "checkpoints/4/model.safetensors").read_bytes() for run in (plain, gone_on))
    assert end == again


def test_muon_without_a_hidden_matrix_is_refused() -> None:
    with pytest.raises(UserError, match="finds no matrix"):
        muon_options.Muon().create(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    with pytest.raises(UserError, match="finds no matrix"):
        muon_options.Muon(adamw=["1", "2"]).create(model)
    with pytest.raises(UserError, match=r"optimizer.adamw: '9' matches no trainable parameter"):
        muon_options.Muon(adamw=["9"]).create(model)
    names = {p: n for n, p in model.named_parameters()}
    muon, adamw = muon_options.Muon(adamw=["1"]).create(model).members
    assert [names[p] for g in muon.param_groups for p in g["params"]] == ["2.weight"]
    assert len([p for g in adamw.param_groups for p in g["params"]]) == 7


def test_unset_forms_take_the_fastest() -> None:
    assert torch_optim.AdamW().implementation("cpu", 10**9) == "fused"
    assert torch_optim.AdamW(foreach=True).implementation("cuda", 10) == "foreach"
    assert torch_optim.AdamW(fused=False, foreach=False).implementation("cuda", 10) == "loop"
    assert Optimizer(lr=0.1, weight_decay=0.0).implementation("cuda", 10) == "loop"
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
    "option",
    [torch_optim.Adagrad(), muon_options.Muon(), by_timm.TimmOptimizer(name="adamw"), by_timm.TimmOptimizer(name="adagrad")],
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
            load_optimizer(after, sharded_checkpoint.by_name(before.state_dict()))
            for member in getattr(after, "members", [after]):
                saved[name] += [state["step"].device.type for state in member.state.values() if "step" in state]
        assert set(saved[name]) == {"cuda" if fused else "cpu"}
