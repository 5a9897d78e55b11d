"""Optimizers in whole runs: their parameter groups, the weights that are saved, and those that run an update themselves."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import drivetrain
from drivetrain.config.compose import compose
from drivetrain.config.validate import machine_local_keys, validate
from drivetrain.core.errors import UserError
from drivetrain.engine.evaluator import Evaluator
from drivetrain.engine.trainer import Trainer
from drivetrain.model.nets import Mlp, ResNet9
from drivetrain.optimizer import flat, torch_optim
from drivetrain.optimizer.algorithms.flat_optimizer import ScheduleFree
from drivetrain.optimizer.closures import Sam
from drivetrain.optimizer.groups import layer_decay_factors
from drivetrain.recipe.reader import read
from drivetrain.run.identity import config_hash
from drivetrain.run.recipe_file import to_recipe
from drivetrain.run.result import Result
from drivetrain.scheduler.curves import Cosine
from tests.support.command import checkpoints, tensors

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
    trained = {p: seen["trained"][n] for n, p in seen["model"].named_parameters()}
    order = (p for group in seen["optimizer"].param_groups for p in group["params"])
    assert all(torch.equal(kept[i]["y"], trained[p]) for i, p in enumerate(order))


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
    with pytest.raises(UserError) as caught:
        torch_optim.Sgd(no_weight_decay=["haed", "layers"], lr_multipliers={"layers.7": 2}).create(mlp())
    assert len(caught.value.problems) == 2
    assert "optimizer.no_weight_decay: 'haed' matches no trainable parameter" in caught.value.problems[0]
    assert "'head'" in caught.value.problems[0]
    assert "optimizer.lr_multipliers: 'layers.7'" in caught.value.problems[1]
    with pytest.raises(UserError, match=r"layer_decay=0.5 wants a model of several layers"):
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
    assert [r["loss"] for r in trainer.log.writers[0] if r["event"] == "train"] == pytest.approx(losses, abs=1e-6)
    for trained, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained, theirs, atol=1e-5, rtol=1e-5)


def test_an_option_whose_optimizer_wants_a_closure_has_to_say_so():
    option = type("Silent", (Sam,), {"takes_closure": False})()
    with pytest.raises(UserError, match="Sam makes its update by a closure: set takes_closure = True in Silent"):
        option.create(torch.nn.Linear(2, 2))
