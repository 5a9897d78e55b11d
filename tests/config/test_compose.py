"""Composing: what the tests put together is what Hydra composes."""

import json
import math
import random
from pathlib import Path
from typing import Literal

import pytest
import torch
from bench.gpu import speed
from bench.gpu.loops import Work

from drivetrain.config import catalog, schema
from drivetrain.config.compose import compose
from drivetrain.config.keys import KeySetter
from drivetrain.config.schema import Schema
from drivetrain.core.errors import UserError
from drivetrain.core.options.allowed import FileName
from drivetrain.core.options.option import Positive
from drivetrain.data import Data
from drivetrain.data.base import Fraction
from drivetrain.launch.job import prepare
from drivetrain.metrics import Metric
from drivetrain.model import Model
from drivetrain.optimizer import Optimizer
from drivetrain.optimizer.torch_optim import AdamW
from drivetrain.recipe.safe_yaml import MAX_WHOLE
from drivetrain.surgery import Edit
from tests.support import composed
from tests.support.refusals import problems_of


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_sections_put_together_are_the_config_that_hydra_composes(seed: int) -> None:
    draw, overrides = random.Random(seed), []
    for group, options in catalog.options().items():
        if draw.random() < 0.4:
            several = ",".join(draw.sample(options, min(2, len(options))))
            overrides.append(f"{group}=[{several}]" if group in catalog.LISTS else f"{group}={draw.choice(options)}")
    whole, put_together = composed.by_hydra(tuple(overrides), ()), composed.from_sections(tuple(overrides), ())
    assert put_together == whole
    assert json.dumps(put_together) == json.dumps(whole), "in this order"


def test_what_is_set_in_a_config_is_not_in_the_next_one() -> None:
    """Configs of the same options share what Hydra composed for them."""
    words = ["model=timm", "task=segmentation"]
    before = json.dumps(compose(words).unresolved)
    given = ["model.kwargs.depths=[1,2]", "optimizer.lr_multipliers={head:3}", "trust=[a]", "epochs='${log_every}'"]
    assert json.dumps(compose([*words, *given]).plain) != before
    composed = compose(words)
    assert json.dumps(composed.unresolved) == json.dumps(composed.option_defaults) == before


def test_a_recipe_that_gives_a_mapping_for_a_list_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {shape: {a: 1}}\n")
    assert problems_of(prepare, ["recipe=mine.yaml", "data=synthetic"]) == ["data.shape={'a': 1}: must be a list"]


def test_an_error_in_a_rule_is_not_taken_for_an_option_that_is_missing(monkeypatch):
    """A rule that asks for what is wrong says nothing; one that is itself wrong fails, whatever else is."""
    from drivetrain.scheduler import Scheduler

    for word in ("data=digts", "data.validation=7"):  # a metric's rule asks for the kind of the data's targets
        with pytest.raises(UserError) as refused:
            prepare(["metrics=[accuracy]", word])
        assert len(refused.value.problems) == 1, refused.value.problems
    monkeypatch.setattr(Scheduler, "validate", lambda self, run: [f"{run.optimizer.lr} {run.values['epochs']}"])
    for word in ("optimizer=adaw", "optimizer.lr=-1", "epochs=0"):
        with pytest.raises(UserError) as refused:
            prepare(["scheduler=constant", word])
        assert len(refused.value.problems) == 1, refused.value.problems
    monkeypatch.setattr(Scheduler, "validate", lambda self, run: run.optimizer.no_such_setting)
    with pytest.raises(AttributeError, match="no_such_setting"):
        prepare(["scheduler=constant", "epochs=0"])


@pytest.mark.parametrize(
    ("hint", "value", "must"),
    [
        (float, "foo", "must be a number"),
        (Fraction | None, "foo", "must be a number or null"),
        (Literal["auto"] | Fraction | FileName | None, False, "must be 'auto', a number, a text or null"),
        (Literal["auto", "all"] | None, 3, "must be one of 'auto' or 'all' or null"),
        (list[int] | None, [], ""),
    ],
)
def test_a_message_names_all_that_a_value_may_be(hint, value, must):
    text = str(value).lower() if isinstance(value, bool) else value
    assert list(Schema("data", {"validation": hint}).problems("data", {"validation": value})) == (
        [f"data.validation={text}: {must}"] if must else []
    )


# --- what a setting's value may be, whoever gives it ---


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_is_finite(value):
    assert ["finite" in told for told in Schema("part", {"setting": float}).problems("part", {"setting": value})] == [True]


@pytest.mark.parametrize("hint", [int, float, list[int]])
def test_a_whole_number_is_one_that_a_library_takes(hint):
    def problems(number: int) -> list[str]:
        return list(Schema("part", {"setting": hint}).problems("part", {"setting": [number] if hint == list[int] else number}))

    assert not problems(MAX_WHOLE)
    assert len(problems(MAX_WHOLE + 1)) == len(problems(-MAX_WHOLE - 1)) == 1


def test_a_setting_that_the_class_does_not_take():
    """The second guard: Hydra's own refuses such a key first, wherever it knows the option's keys."""
    assert list(schema.of(AdamW).problems("optimizer", {"lr": 0.1, "lrr": 0.1})) == [
        "optimizer.lrr: AdamW takes no such argument"
    ]


def test_a_text_from_the_environment_is_what_its_key_takes():
    """Checked once: what it stands for is the value, also of the config that is shown; what is wrong with it is told of that."""
    hints = {"rate": Positive, "name": str, "on": bool, "either": Literal["auto"] | float}
    given = {"rate": "0.5", "name": "0.5", "on": "true", "either": "0.25"}
    values, wrong = Schema("part", hints).check("part", given, texts=given)
    assert (values, wrong) == ({"rate": 0.5, "name": "0.5", "on": True, "either": 0.25}, {})
    assert {key: type(value) for key, value in values.items()} == {"rate": float, "name": str, "on": bool, "either": float}
    told = {"rate": "-1", "on": "maybe", "either": "all"}
    assert Schema("part", hints).check("part", told, texts=told)[1] == {
        "rate": "part.rate=-1: must be > 0.0",
        "on": "part.on=maybe: must be true or false",
        "either": "part.either=all: must be 'auto' or a number",
    }
    assert [*Schema("part", hints).check("part", {"rate": "1"})[1]] == ["rate"], "typed, a text is none"


@pytest.mark.parametrize(
    ("base", "method", "arguments"),
    [(Optimizer, "make", 2), (Model, "create", 2), (Metric, "create", 1), (Edit, "apply", 2), (Data, "load", 1)],
)
def test_a_method_that_an_option_lacks_is_named(base, method, arguments):
    class Bare(base):
        pass

    with pytest.raises(UserError, match=rf"test_compose\.Bare has no method {method}, .* docs/extending.md shows"):
        getattr(Bare.__new__(Bare), method)(*[None] * arguments)


# --- recipes that ship hold what their descriptions promise; tests/test_zoo.py checks whether each is valid ---


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder of packed images."""
    folder = tmp_path_factory.mktemp("images") / "packed"
    speed.pack(Work((), (3, 224, 224), 2, batch=4, steps=1), folder)
    return folder


def test_the_recipe_for_a_gpu_is_fast_and_what_only_a_gpu_gains_from():
    fast, gpu = (prepare([f"recipe={name}"]).run for name in ("fast", "fast_gpu"))
    differ = {group for group in fast.choices if fast.choices[group] != gpu.choices[group]}
    assert differ == {"loader", "compile"}
    assert (gpu.choices["loader"], gpu.choices["compile"]) == ("resident", "step")


@pytest.mark.parametrize("words", [[], ["model.name=vit_base_patch16_224", "optimizer=adamw", "optimizer.lr=0.001"]])
def test_the_recipe_for_large_models_trains_them_compiled_on_bytes(words, packed):
    large = prepare(["recipe=imagenet_gpu", f"data.root={packed}", *words]).run
    assert (large.choices["loader"], large.choices["compile"], large.choices["precision"]) == ("device", "inductor", "bf16")
    assert large.loader.augments_on_device
    assert large.optimizer.fused


def test_on_a_cpu_the_recipe_for_a_gpu_says_what_it_cannot_do_there(packed):
    loader = prepare(["recipe=imagenet_gpu", f"data.root={packed}"]).run.loader
    (line,) = loader.autotune(None, 1, 9, torch.device("cpu"))
    assert "loader=device: the device is the CPU" in line
    assert loader.autotune(None, 1, 9, torch.device("cuda")) == []


def test_an_empty_mapping_takes_the_place_of_a_default_that_is_not() -> None:
    """So a recipe that spells out `lr_multipliers: {}` stays what it was when the default becomes another."""
    config = {"optimizer": {"lr_multipliers": {"head": 10}, "lr": 1}}
    assert KeySetter(config, {}).set("optimizer.lr_multipliers", {}) is None
    assert config == {"optimizer": {"lr_multipliers": {}, "lr": 1}}
