"""Our optimizers are torch's, with the parameter groups that were asked for and a step without its wrappers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import drivetrain
from drivetrain.config.compose import compose
from drivetrain.config.validate import machine_local_keys, validate
from drivetrain.core.errors import UserError
from drivetrain.model.mlp import Mlp
from drivetrain.model.resnet9 import ResNet9
from drivetrain.optimizer import layerwise, torch_optim
from drivetrain.optimizer.algorithms.layerwise_optimizer import Lamb, Lars
from drivetrain.optimizer.closures import Sam
from drivetrain.optimizer.groups import layer_decay_factors
from drivetrain.recipe.reader import read
from drivetrain.run.identity import config_hash
from drivetrain.run.recipe_file import to_recipe
from drivetrain.run.result import Result
from tests.support.command import checkpoints

IMPLEMENTATIONS = {
    "default": ({}, {"fused": True}),
    "fused": ({"fused": True}, {"fused": True}),
    "foreach": ({"foreach": True}, {"foreach": True}),
    "loop": ({"fused": False, "foreach": False}, {"fused": False, "foreach": False}),
}
OPTIMIZERS = {
    "sgd": (
        lambda how: torch_optim.Sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **how),
        lambda groups, how: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, **how),
    ),
    "sgd without momentum": (
        lambda how: torch_optim.Sgd(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.01, **how),
        lambda groups, how: torch.optim.SGD(groups, lr=0.1, **how),
    ),
    "adamw": (
        lambda how: torch_optim.AdamW(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.01, **how),
        lambda groups, how: torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-6, **how),
    ),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ours_equals_torchs_own_step_for_step(name, how):
    build, reference = OPTIMIZERS[name]
    settings, torchs = IMPLEMENTATIONS[how]
    a, b = net(), net()
    mine = build(settings).create(a)
    matrices, vectors = ([p for p in b.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    theirs = reference([{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], torchs)
    start = [p.clone() for p in a.parameters()]
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for group in (*mine.param_groups, *theirs.param_groups):
            group["lr"] = 0.1 / (step + 1)  # as a schedule does
        mine.step()
        theirs.step()
    for begun, p, q in zip(start, a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, begun)
    assert not any(p.grad_fn for p in a.parameters())


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
def test_the_implementation_is_the_one_that_was_asked_for(how):
    settings, torchs = IMPLEMENTATIONS[how]
    built = torch_optim.AdamW(**settings).create(net())
    assert {k: bool(built.defaults[k]) for k in ("fused", "foreach")} == {"fused": False, "foreach": False, **torchs}


def test_decay_without_gradient_moves_matrices_alone():
    model = net()
    start = [p.clone() for p in model.parameters()]
    built = torch_optim.Sgd(lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.1).create(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    built.step()
    for begun, p in zip(start, model.parameters(), strict=True):
        torch.testing.assert_close(p, begun * 0.9 if p.ndim > 1 else begun)


def test_the_factor_multiplies_the_learning_rate():
    assert {g["lr"] for g in torch_optim.Sgd(lr=0.1).create(net(), 4.0).param_groups} == {0.4}


def test_its_state_goes_into_torchs_own_optimizer_and_back():
    a = net()
    mine = torch_optim.AdamW().create(a)
    for p in a.parameters():
        p.grad = torch.ones_like(p)
    mine.step()
    theirs = torch.optim.AdamW([{"params": [p for p in net().parameters() if p.ndim > 1]},
                                {"params": [p for p in net().parameters() if p.ndim < 2]}])  # fmt: skip
    theirs.load_state_dict(mine.state_dict())
    back = torch_optim.AdamW().create(net())
    back.load_state_dict(theirs.state_dict())
    states = [list(o.state_dict()["state"].values()) for o in (mine, back)]
    assert len(states[0]) == 6
    for p, q in zip(*states, strict=True):
        assert p["step"] == q["step"] == 1
        assert torch.equal(p["exp_avg"], q["exp_avg"])
        assert p["exp_avg"].any()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optimizer.lr=-1"], "optimizer.lr=-1"),
        (["optimizer.lr=0"], "optimizer.lr=0"),
        (["optimizer.lr=fast"], "optimizer.lr=fast"),
        (["optimizer.momentum=1.0"], "optimizer.momentum=1.0"),
        (["optimizer.weight_decay=-0.1"], "optimizer.weight_decay=-0.1"),
        (["optimizer.fused=true", "optimizer.foreach=true"], "exclude each other"),
        (["optimizer.momentum=0.0", "optimizer.nesterov=true"], "needs momentum"),
    ],
)
def test_what_cannot_be_is_refused(problems, words, says):
    assert any(says in p and "optimizer." in p for p in problems(*words))


# --- whole runs: every optimizer learns the digits, and what is evaluated, saved and resumed are the right weights ---


RATES: dict[str, list[str]] = {
    "sgd": [], "adam": [], "adamw": [], "rmsprop": [], "adagrad": [], "adafactor": [], "lars": ["optimizer.lr=1"],
    "lamb": [], "nvlamb": [], "novograd": [], "muon": [], "lion": [], "schedulefree": ["scheduler=constant"],
    "shampoo": [], "soap": [], "timm": [],
}  # fmt: skip


def short(names: Iterable[str], *normal: str) -> list[Any]:
    """All of the names; those that are not `normal` are slow tests."""
    return [name if name in normal else pytest.param(name, marks=pytest.mark.slow) for name in names]


def run(out: Path, *words: str, epochs: int = 5) -> Result:
    fixed = ["model=mlp", f"epochs={epochs}", f"output_dir={out}", "runtime.threads=1"]
    result = drivetrain.train([*fixed, *words])
    assert result.status == "completed", result.error
    return result


def newest(result: Result) -> Path:
    return max((result.run_dir / "checkpoints").iterdir(), key=lambda p: int(p.name))


def weights(result: Result) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(newest(result) / "model.safetensors")


@pytest.mark.parametrize("name", short(RATES, "adamw", "timm"))
def test_learns_the_digits(name: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"optimizer={name}", *RATES[name])
    assert result.judged("final")["accuracy"] > 0.85  # chance is 0.1


def test_schedulefree_evaluates_and_saves_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.engine.evaluator import Evaluator
    from drivetrain.engine.trainer import Trainer
    from drivetrain.optimizer.algorithms.flat_optimizer import ScheduleFree

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
    saved = weights(result)
    assert isinstance(seen["optimizer"], ScheduleFree)
    assert all(torch.equal(p, saved[n]) for p, n in zip(seen["evaluated"], seen["trained"], strict=True))
    assert any(not torch.equal(saved[n], p) for n, p in seen["trained"].items())
    kept = torch.load(newest(result) / "state.pt", weights_only=True)["optimizer"]["state"]
    trained = {p: seen["trained"][n] for n, p in seen["model"].named_parameters()}
    order = (p for group in seen["optimizer"].param_groups for p in group["params"])
    assert all(torch.equal(kept[i]["y"], trained[p]) for i, p in enumerate(order))


@pytest.mark.parametrize("name", short(["sgd", "lamb", "novograd", "muon"], "lamb"))
def test_with_loss_scaling(name: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"optimizer={name}", "precision=amp", "batch=accumulate", "batch.accumulation_steps=2", epochs=3)
    assert result.judged("final")["accuracy"] > 0.7


def test_groups_reach_the_run(tmp_path: Path) -> None:
    words = [
        "optimizer=lamb",
        "optimizer.layer_decay=0.7",
        "optimizer.lr_multipliers={head: 2}",
        "optimizer.no_weight_decay=[layers.1]",
    ]
    assert run(tmp_path, *words).judged("final")["accuracy"] > 0.8


# --- a layer's trust ratio with no gradient or no weight is 1, not a division by zero ---


@pytest.mark.parametrize("zero", ["weights", "gradients"])
def test_lamb(zero):
    weight = torch.nn.Parameter(torch.zeros(4) if zero == "weights" else torch.ones(4))
    weight.grad = torch.full((4,), 2.0) if zero == "weights" else torch.zeros(4)
    optimizer = Lamb(
        [weight], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, bias_correction=True, max_grad_norm=1.0, fused=False
    )
    optimizer.step()
    expected = torch.full((4,), -0.1) if zero == "weights" else torch.ones(4)  # the step of Adam, whose ratio is 1; or none
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("zero", ["weights", "gradients"])
def test_lars(zero):
    weight = torch.nn.Parameter(torch.zeros(4) if zero == "weights" else torch.ones(4))
    weight.grad = torch.full((4,), 2.0) if zero == "weights" else torch.zeros(4)
    optimizer = Lars([weight], lr=0.1, momentum=0.0, weight_decay=0.5, nesterov=False, trust=0.001)
    optimizer.step()
    expected = torch.full((4,), -0.2 if zero == "weights" else 0.95)  # plain SGD, with its decay
    torch.testing.assert_close(weight.detach(), expected)


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
    assert not any(n.startswith("head") for n in by_name(model, layerwise.Lamb()))
    model.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        layerwise.Lamb().create(model)


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


def test_layer_decay_by_timms_own_layers() -> None:
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_layer_decay

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=24, num_heads=2, num_classes=5)
    names = {p: n for n, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.7)
    theirs = {names[p]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert by_name(model, torch_optim.AdamW(lr=1.0, weight_decay=0.05, layer_decay=0.7)) == theirs
    assert theirs["pos_embed"][1] == 0


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
    """The factors are timm's, and grow by a layer at a time from the input to the head, which has the whole rate."""
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_layer_decay

    model = timm.create_model(name, num_classes=5, **kwargs).eval()
    factors = layer_decay_factors(model, 0.5)
    names = {p: n for n, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    assert factors == {names[p]: g["lr_scale"] for g in groups for p in g["params"]}
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
    with pytest.raises(UserError) as caught:
        torch_optim.Sgd(no_weight_decay=["haed", "layers"], lr_multipliers={"layers.7": 2}).create(mlp())
    assert len(caught.value.problems) == 2
    assert "optimizer.no_weight_decay: 'haed' matches no trainable parameter" in caught.value.problems[0]
    assert "'head'" in caught.value.problems[0]
    assert "optimizer.lr_multipliers: 'layers.7'" in caught.value.problems[1]
    with pytest.raises(UserError, match=r"layer_decay=0.5 wants a model of several layers"):
        torch_optim.Sgd(layer_decay=0.5).create(torch.nn.Linear(3, 3))


def test_the_schedule_keeps_the_multiples() -> None:
    from drivetrain.scheduler.decay import Cosine

    model = mlp()
    optimizer = layerwise.Lamb(lr=0.1, lr_multipliers={"head": 10}).create(model, lr_factor=2.0)
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


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.lr_multipliers={head: fast}", "head=fast: a multiplier of the learning rate must be a number > 0"),
        ("optimizer.lr_multipliers={head: 0}", "must be a number > 0"),
        ("optimizer.lr_multipliers={head: true}", "must be a number > 0"),
        ("optimizer.lr_multipliers={head: 2, head.bias: 3}", "head contains head.bias"),
        ("optimizer.layer_decay=1.5", "must be ≤ 1"),
        ("optimizer.layer_decay=0", "must be > 0"),
        ("optimizer.no_weight_decay=[1]", "must be a text"),
        ("optimizer.lr=-1", "must be > 0"),
    ],
)
def test_bad_values_are_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("[", r"\[")):
        validate(compose([word]))


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
    stream = trainer.loader.stream(trainer.train_data, trainer.requests(), trainer.device, trainer.memory_format)
    losses = list(by_hand(model, name, (batch for batch, _ in zip(stream, range(4), strict=False))))
    trainer.fit()
    assert [r["loss"] for r in trainer.log.writers[0] if r["event"] == "train"] == pytest.approx(losses, abs=1e-6)
    for trained, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained, theirs, atol=1e-5, rtol=1e-5)


def weights_after(result):
    assert result.status == "completed", result.error
    return safetensors.torch.load_file(checkpoints(Path(result.run_dir))[-1] / "model.safetensors")


@pytest.mark.parametrize("name", ["lbfgs", "sam"])
@pytest.mark.parametrize(
    "words",
    [["batch=accumulate", "batch.accumulation_steps=3"], ["parallel=ddp", "parallel.nproc=2"], ["loss.class_weights=[1,2,1,2]"]],
    ids=lambda words: words[0],
)
def test_its_runs_are_the_same_however_an_update_is_split(train, name, words):
    given = [*LINEAR, *OPTIONS[name], *(words if "loss" in words[0] else [])]
    split = words if "loss" not in words[0] else ["batch=accumulate", "batch.accumulation_steps=3"]
    one, other = weights_after(train(*given)), weights_after(train(*given, *split))
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["lbfgs", "sam"])
def test_each_run_draws_alike_and_a_resume_goes_on(train, name):
    """With dropout a line search would compare different losses, were each of its forwards to draw anew."""
    given = [*LINEAR, *OPTIONS[name], "model.dropout=0.5", "saving=last", "evaluate_every=1", "updates=null"]
    whole, half = train(*given, "epochs=2"), train(*given, "epochs=1")
    rest = drivetrain.train([f"resume={half.run_dir}", "epochs=2"])
    one, two = weights_after(whole), weights_after(rest)
    assert all(torch.equal(value, two[key]) for key, value in one.items())


@pytest.mark.parametrize("words", [["precision=amp"], ["compile=step"], ["parallel=fsdp"], ["batch=auto"]], ids=lambda w: w[0])
def test_what_cannot_run_again_is_refused(problems, words):
    said = problems("optimizer=lbfgs", *words)
    assert any("optimizer=lbfgs and" in p and "several times" in p for p in said), said


def test_an_option_whose_optimizer_wants_a_closure_has_to_say_so():
    option = type("Silent", (Sam,), {"takes_closure": False})()
    with pytest.raises(UserError, match="Sam makes its update by a closure: set takes_closure = True in Silent"):
        option.create(torch.nn.Linear(2, 2))


def test_lbfgs_has_no_decay(problems):
    assert any("set optimizer.weight_decay=0" in p for p in problems("optimizer=lbfgs", "optimizer.weight_decay=0.1"))
