"""Who decays, at which multiple of the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import optimizer as options
from drivetrain.config.compose import compose
from drivetrain.config.validate import machine_local_keys, validate
from drivetrain.core.errors import UserError
from drivetrain.model.mlp import Mlp
from drivetrain.model.resnet9 import ResNet9
from drivetrain.optimizer.groups import layer_decay_factors
from drivetrain.recipe.reader import read
from drivetrain.run.identity import config_hash
from drivetrain.run.recipe_file import to_recipe


def by_name(model: torch.nn.Module, knobs: Any) -> dict[str, tuple[float, float]]:
    """Parameter's name → (lr, weight_decay)."""
    names = {p: n for n, p in model.named_parameters()}
    groups = knobs.create(model).param_groups
    found = {names[p]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(found) == sum(len(g["params"]) for g in groups)  # each once
    return found


def mlp() -> Mlp:
    return Mlp((4,), 3, (5, 5, 5), 0.0)


def test_decay_is_off_for_norms_biases_and_listed_names() -> None:
    model = ResNet9((1, 8, 8), 10, 4, bias=True)
    plain = by_name(model, options.AdamW(lr=0.1, weight_decay=0.5))
    assert {n for n, (_, decay) in plain.items() if decay} == {n for n, p in model.named_parameters() if p.ndim > 1}
    listed = by_name(model, options.AdamW(lr=0.1, weight_decay=0.5, no_weight_decay=["head", "features.0.?.weight"]))
    off = {n for n in plain if plain[n][1] and not listed[n][1]}
    assert off == {"head.weight", "features.0.0.weight"}
    everything = by_name(model, options.AdamW(lr=0.1, weight_decay=0.5, decay_norm_and_bias=True, no_weight_decay=["head.bias"]))
    assert {n for n, (_, decay) in everything.items() if not decay} == {"head.bias"}


def test_without_decay_there_is_one_group() -> None:
    assert len(options.Sgd(weight_decay=0.0).create(mlp()).param_groups) == 1
    assert len(options.Sgd(weight_decay=0.5).create(mlp()).param_groups) == 2


def test_the_models_own_list_is_followed() -> None:
    class Own(torch.nn.Linear):
        def no_weight_decay(self) -> set[str]:
            return {"weight"}

    assert by_name(Own(3, 3), options.Sgd(weight_decay=0.5))["weight"][1] == 0
    assert by_name(Own(3, 3), options.Sgd(weight_decay=0.5, decay_norm_and_bias=True))["weight"][1] == 0.5


def test_frozen_parameters_are_left_out() -> None:
    model = mlp()
    model.head.requires_grad_(False)
    assert not any(n.startswith("head") for n in by_name(model, options.Lamb()))
    model.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        options.Lamb().create(model)


def test_lr_of_multiplies_and_the_first_group_has_the_plain_rate() -> None:
    model = mlp()
    given = {"head": 10, "*.bias": 0.5, "layers": {"0": {"linear": {"weight": 3}}}}
    rates = {n: round(lr, 9) for n, (lr, _) in by_name(model, options.AdamW(lr=0.1, lr_multipliers=given)).items()}
    assert rates["layers.0.linear.weight"] == 0.3
    assert rates["layers.1.linear.weight"] == 0.1
    assert rates["layers.1.linear.bias"] == 0.05
    assert rates["head.weight"] == 1.0
    assert rates["head.bias"] == 0.5  # both patterns
    assert options.AdamW(lr=0.1, lr_multipliers=given).create(model).param_groups[0]["lr"] == 0.1


def test_layer_decay_by_repeated_blocks() -> None:
    shares = layer_decay_factors(mlp(), 0.5)
    assert [shares[f"layers.{i}.linear.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert shares["head.bias"] == 1.0
    resnet = layer_decay_factors(ResNet9((1, 8, 8), 10, 4, bias=False), 0.5)
    assert resnet["head.weight"] == 1.0
    assert sorted(set(resnet.values())) == [0.125, 0.25, 0.5, 1.0]  # stem, two residuals, head
    assert resnet["features.0.0.weight"] == 0.125
    rates = by_name(mlp(), options.AdamW(lr=1.0, layer_decay=0.5, lr_multipliers={"head": 4}))
    assert rates["layers.0.linear.weight"][0] == 0.125
    assert rates["head.weight"][0] == 4.0


def test_layer_decay_by_timms_own_layers() -> None:
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_layer_decay

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=24, num_heads=2, num_classes=5)
    names = {p: n for n, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.7)
    theirs = {names[p]: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert by_name(model, options.AdamW(lr=1.0, weight_decay=0.05, layer_decay=0.7)) == theirs
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
        options.Sgd(no_weight_decay=["haed", "layers"], lr_multipliers={"layers.7": 2}).create(mlp())
    assert len(caught.value.problems) == 2
    assert "optimizer.no_weight_decay: 'haed' matches no trainable parameter" in caught.value.problems[0]
    assert "'head'" in caught.value.problems[0]
    assert "optimizer.lr_multipliers: 'layers.7'" in caught.value.problems[1]
    with pytest.raises(UserError, match=r"layer_decay=0.5 wants a model of several layers"):
        options.Sgd(layer_decay=0.5).create(torch.nn.Linear(3, 3))


def test_the_schedule_keeps_the_multiples() -> None:
    from drivetrain.scheduler import Cosine

    model = mlp()
    optimizer = options.Lamb(lr=0.1, lr_multipliers={"head": 10}).create(model, lr_factor=2.0)
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
    assert "no brackets" in next(options.Sgd(lr_multipliers={"head[0]": 2}).validate(run))
