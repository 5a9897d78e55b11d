"""`drivetrain recipe schema`: what it accepts and refuses is what drivetrain does."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain.cli import main
from drivetrain.cli.recipe_schema import NAMES_CODE, recipe_schema
from drivetrain.config.catalog import LISTS, options
from drivetrain.config.compose import compose
from drivetrain.core.errors import UserError
from drivetrain.core.paths import recipes_dir
from drivetrain.launch.job import prepare
from tests.recipe.test_format import exported

OUR_ROOT = Path(__file__).parents[2]
HEAD = 'schema: 1\ndrivetrain: "0.1.0"\nhash: "0123456789abcdef"\nleft_out: [model]\n'
CLAIM = (
    "claim:\n  speed:\n    ratio: 2\n    interval: [1, 3]\n    against: {precision: fp32}\n"
    "  device: {kind: cpu, name: a}\n  versions: {torch: 2.15.0}\n"
)


shipped = functools.cache(recipe_schema)


@functools.cache
def validator() -> Any:
    return pytest.importorskip("jsonschema").Draft202012Validator(shipped())


@pytest.mark.slow
def test_it_is_a_schema_itself():
    validator().check_schema(shipped())


def wrong(text: str) -> list[str]:
    """The places at which the schema refuses a recipe."""
    return [error.json_path for error in validator().iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("file", [*sorted(recipes_dir().glob("*.yaml")), *sorted(OUR_ROOT.glob("examples/**/recipe*.yaml"))])
def test_it_accepts_every_recipe_that_ships(file: Path):
    assert not wrong(file.read_text())


ROWS = range(max(len(names) for group, names in options().items() if group not in LISTS))


@pytest.mark.parametrize("row", ROWS[::9])
def test_it_accepts_every_exported_recipe(row: int):
    single = {g: [n for n in names if n != NAMES_CODE] for g, names in options().items() if g not in LISTS}
    words = [f"{g}={names[row % len(names)]}" for g, names in single.items()]
    lists = {g: [n for n in names if n not in ("none", NAMES_CODE)] for g, names in options().items() if g in LISTS}
    assert not wrong(exported(*words, *(f"{g}=[{','.join(names)}]" for g, names in lists.items())).read_text())
    assert not wrong(exported("loss=[cross_entropy,focal]", "loss.weights=[1,0.5]", "task=segmentation", "epochs=2").read_text())


GOOD = [
    "",
    HEAD + "epochs: 3\n",
    CLAIM,
    "optimizer.lr: 0.1\ndefaults: [{override /augment: [mixup]}]\naugment:\n  mixup: {alpha: 0.4}\n",
    "defaults: [{override /optimizer: sgd}, {/precision: bf16}, {batch: fixed}, _self_]\n",
    "defaults:\n- override /optimizer: lamb\noptimizer: {lr: 0.1, lr_multipliers: {head.*: 10}}\n",
    "scheduler:\n  warmup: 5ep\nmodel:\n  freeze: ['*.bias']\nselect: null\n",
    "optimizer: {lr: '${scheduler.warmup}'}\n",
    "sweep:\n  surgery: [[], [channels_last]]\n  precision: [fp32, bf16]\n  optimizer.lr: [0.1, 0.2]\n  epochs: 2\n",
    "unchanged:\n  defaults: [{override /precision: fp32}]\n  optimizer: {lr: 0.1}\n",
]
BAD = {  # a typo or a wrong value → where it is
    "epoch: 3\n": "$",
    "epochs: 0\n": "$.epochs",
    "epochs: three\n": "$.epochs",
    "optimizer: {lrr: 0.1}\n": "$.optimizer",
    "optimizer.lrr: 0.1\n": "$",
    "optimizer: {lr: -1}\n": "$.optimizer.lr",
    "defaults: [{override /optimizer: sgdd}]\n": "$.defaults[0]",
    "defaults: [{override /optimiser: sgd}]\n": "$.defaults[0]",
    "defaults: [{override /optimizer: adamw}]\noptimizer: {nesterov: true}\n": "$.optimizer",
    "defaults: [{override /model: own}]\n": "$.defaults[0]",
    "batch: {lr_scaling: cubic}\n": "$.batch.lr_scaling",
    "augment: {mixup: {alfa: 0.4}}\n": "$.augment.mixup",
    "augment: {mixupp: {alpha: 0.4}}\n": "$.augment",
    "runtime: {device: cuda}\n": "$.runtime",
    "trust: [a]\n": "$",
    "logger: {}\n": "$",
    "schema: 2\n": "$.schema",
    "schema: 1\nhash: 12\n": "$.hash",
    "sweep: {optimizer.lrr: [1]}\n": "$.sweep",
    "sweep: {precision: [fp33]}\n": "$.sweep.precision",
    "unchanged: {epoch: 3}\n": "$.unchanged",
    CLAIM.replace("ratio: 2", "ration: 2"): "$.claim.speed",
}


@pytest.mark.parametrize("text", GOOD)
def test_it_accepts_what_a_recipe_may_say(text: str):
    assert not wrong(text or "{}")
    Path("r.yaml").write_text(text)
    assert compose(["recipe=r.yaml"]).problems == []


@pytest.mark.parametrize("text", BAD)
def test_it_refuses_what_drivetrain_refuses(text: str):
    assert BAD[text] in wrong(text)
    Path("r.yaml").write_text(text)
    with pytest.raises(UserError):
        prepare(["recipe=r.yaml"])


def test_an_editor_is_told_what_the_files_say():
    schema = shipped()
    lr = schema["$defs"]["batch.fixed"]["properties"]["lr_scaling"]
    assert lr["default"] == "none"
    assert lr["anyOf"][0]["enum"] == ["none", "linear", "sqrt"]
    assert "global_batch / base_batch" in lr["description"]
    assert schema["properties"]["epochs"]["description"] == "passes over the training data"
    precision = schema["$defs"]["choice.precision"]
    assert {"fp32", "bf16"} < set(precision["enum"])
    assert len(precision["enum"]) == len(precision["enumDescriptions"])


def test_the_command_writes_it(capsys, monkeypatch):
    monkeypatch.setattr("drivetrain.cli.recipe_schema.recipe_schema", lambda dirs: {"given": dirs})
    assert main.main(["recipe", "schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"given": []}
    assert main.main(["recipe", "schema", "recipe.schema.json"]) == 0
    assert Path("recipe.schema.json").read_text() == printed
    assert main.main(["recipe", "schema", "mine.yaml"]) == 2, "a recipe is not overwritten"


def test_the_users_own_options_are_in_it():
    """Without trust their code is not imported: the names are checked, and the values are not."""
    folder = str(OUR_ROOT / "examples" / "extending" / "conf")
    schema = recipe_schema([folder])
    assert schema["$defs"]["augment.invert"]["properties"]["probability"] == {
        "default": 0.5,
        "description": "of a sample to be inverted",
    }
