"""The content of a recipe: a text of it reaches a library only from a list. Anything else is refused before it has an effect."""

from __future__ import annotations

import colorsys
import inspect
import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from omegaconf import OmegaConf

from drivetrain.cli import recipe
from drivetrain.cli.main import main
from drivetrain.config import recipe_checks, schema
from drivetrain.config.catalog import option_files
from drivetrain.config.compose import compose
from drivetrain.core import allowed
from drivetrain.core.allowed import Entries, Text, one_of
from drivetrain.core.errors import UserError
from drivetrain.core.user_code import import_name
from drivetrain.launch.job import checked, prepare
from drivetrain.loss import distill
from drivetrain.recipe import reader as recipes
from drivetrain.recipe.safe_yaml import OPERATOR_KEYS
from drivetrain.testing import contract_problems
from tests.support.command import run
from tests.support.effects import limited, watched


def choose(group: str, option: str, values: str) -> str:
    """A recipe that chooses an option and sets values of it, given as lines of YAML."""
    lines = "".join(f"  {line}\n" for line in values.splitlines())
    return f"defaults:\n  - override /{group}: {option}\n{group}:\n{lines}"


def timm(values: str) -> str:
    return choose("model", "timm", values)


HOSTILE: dict[str, tuple[str, int, str]] = {  # what it is: the recipe, the line that is refused, what the refusal names
    "timm: a cache folder": (timm("kwargs:\n  cache_dir: ."), 5, "cache_dir"),
    "timm: a file from the net": (
        timm("kwargs:\n  pretrained_cfg_overlay:\n    url: http://127.0.0.1/colorsys.py"), 6, "pretrained_cfg_overlay.url",
    ),
    "timm: a file": (timm("kwargs:\n  pretrained_cfg_overlay:\n    file: weights.pth"), 6, "pretrained_cfg_overlay.file"),
    "timm: a hub's file": (timm("kwargs:\n  pretrained_cfg:\n    hf_hub_id: a/b"), 6, "pretrained_cfg.hf_hub_id"),
    "timm: a config by its name": (timm("kwargs: {pretrained_cfg: a1_in1k}"), 4, "pretrained_cfg"),
    "timm: a checkpoint": (timm("kwargs:\n  checkpoint_path: /etc/passwd"), 5, "checkpoint_path"),
    "timm: a checkpoint, dotted": ("defaults:\n  - override /model: timm\nmodel.kwargs.checkpoint_path: x\n", 3, "checkpoint"),
    "timm: an open file": (timm("kwargs: {checkpoint_path: 0}"), 4, "checkpoint_path"),
    "timm: weights of its own": (timm("kwargs: {pretrained: true}"), 4, "pretrained"),
    "timm: pretrained": (timm("pretrained: true"), 4, "model.pretrained"),
    "timm: weights": (timm("weights: weights.pth"), 4, "model.weights"),
    "timm: a module": (timm("kwargs: {norm_layer: os.system}"), 4, "norm_layer"),
    "timm: a mapping where a number belongs": (timm("kwargs: {depths: [{a: 1}]}"), 4, "depths"),
    "timm: a huge number": (timm("kwargs: {depth: 1000000000000}"), 4, "between"),
    "timm: a hub's name": (timm("name: hf-hub:a/b"), 4, "hf-hub:a/b"),
    "timm: a hub's name in capitals": (timm("name: HF_HUB:a/b"), 4, "HF_HUB:a/b"),
    "timm: a folder's name": (timm("name: local-dir:."), 4, "local-dir:."),
    "timm: a file's name": (timm("name: file:/etc/passwd"), 4, "file:/etc/passwd"),
    "timm: a path": (timm("name: ../resnet18"), 4, "../resnet18"),
    "timm: by a reference": (timm("kwargs:\n  checkpoint_path: ${model.name}"), 5, "checkpoint_path"),
    "timm: a name that is put together": (timm("name: hf-hub:a/${optimizer.lr}"), 4, "hf-hub:a/0"),
    "timm: swept": ("sweep:\n  model: [timm]\n  model.kwargs: [{cache_dir: .}]\n", 3, "cache_dir"),
    "timm: in a claim": (
        "claim:\n  device: {kind: cpu, name: a chip}\n  versions: {torch: '2'}\n  speed:\n    ratio: 2\n    interval: [1, 3]\n"
        "    against:\n      model: timm\n      model.name: hf-hub:a/b\n", 9, "hf-hub:a/b",
    ),
    "timm's optimizers: a function": (choose("optimizer", "timm", "kwargs: {param_group_fn: os.system}"), 4, "param_group_fn"),
    "timm's optimizers: a path": (choose("optimizer", "timm", "name: ../adamw"), 4, "../adamw"),
    "a pattern of names that is code": ("optimizer:\n  no_weight_decay: ['__import__(\"os\")']\n", 2, "no_weight_decay"),
    "a class of blocks that is a path": (choose("checkpointing", "blocks", "block: /etc/passwd"), 4, "block"),
    "a multiplier that is a text": ("optimizer:\n  lr_multipliers: {head: /etc}\n", 2, "lr_multipliers"),
    "a metric that is a path": (choose("stop", "early", "metric: ../loss"), 4, "../loss"),
    "select": ("select: /etc/passwd\n", 1, "/etc/passwd"),
    "datasets: a folder": (choose("data", "huggingface", "root: ."), 4, "data.root"),
    "datasets: a split that is a path": (choose("data", "huggingface", "train: ../train"), 4, "../train"),
    "datasets: a column that is an address": (choose("data", "huggingface", "image: http://127.0.0.1"), 4, "http"),
    "webdataset: shards": (choose("data", "webdataset", "train: http://127.0.0.1/{000..999}.tar"), 4, "data.train"),
    "webdataset: a pattern over the disk": (choose("data", "webdataset", "train: /*/*/*/*"), 4, "data.train"),
    "webdataset: a program": (choose("data", "webdataset", "train: 'pipe:touch PWNED'"), 4, "data.train"),
    "webdataset: a cache": (choose("data", "webdataset", "cache: ."), 4, "data.cache"),
    "webdataset: validation elsewhere": (choose("data", "webdataset", "validation: ../x.tar"), 4, "data.validation"),
    "torchvision: a download": (choose("data", "cifar10", "download: true"), 4, "data.download"),
    "a table": (choose("data", "tabular", "path: /etc/passwd"), 4, "data.path"),
    "a folder of images outside": (choose("data", "masks", "images: ../.."), 4, "data.images"),
    "a validation set outside": (choose("data", "imagefolder", "validation: /etc"), 4, "data.validation"),
    "a tokenizer": (choose("data", "jsonl", "tokenizer_file: x.json"), 4, "data.tokenizer_file"),
    "a teacher": (choose("loss", "distill", "teacher: run"), 4, "loss.teacher"),
    "a compiler's cache": (choose("compile", "inductor", "cache_dir: ."), 4, "compile.cache_dir"),
    "another machine": (choose("parallel", "ddp", "rendezvous: 127.0.0.1:29500"), 4, "parallel.rendezvous"),
    "devices": (choose("parallel", "split", "devices: [cpu, cpu]"), 4, "parallel.devices"),
    "a device": ("runtime:\n  device: cuda\n", 2, "runtime.device"),
    "own model": (choose("model", "own", "target: posix.system"), 4, "model.target"),
    "own data": (choose("data", "own", "target: posix.system\ncollate: posix.system"), 5, "data.collate"),
    "own loss": (choose("loss", "own", "target: posix.system"), 4, "loss.target"),
    "own loss among others": ("defaults:\n  - override /loss: [cross_entropy, own]\nloss.own.target: posix.system\n", 3, "own"),
    "own metric": ("defaults:\n  - override /metrics: [own]\nmetrics.own.target: posix.system\n", 3, "metrics.own.target"),
    "own code's arguments": (choose("model", "own", "kwargs: {file: /etc/passwd}"), 4, "file"),
    "an own metric's name": ("defaults:\n  - override /metrics: [own]\nmetrics.own.name: ../../x\n", 3, "metrics.own.name"),
    "trust": ("trust: [posix]\n", 1, "trust"),
    "a callback": ("callbacks: [posix.system]\n", 1, "callbacks"),
    "a target": ("optimizer:\n  _target_: posix.system\n", 2, "_target_"),
    "a target in a list": (timm("kwargs:\n  a: [{_target_: posix.system}]"), 5, "_target_"),
    "a task's preset": ("task:\n  preset: {trust: [posix]}\n", 2, "preset"),
    "a logger": ("logger: [wandb]\n", 1, "logger"),
    "a logger's address": ("logger.mlflow.uri: http://127.0.0.1\n", 1, "logger"),
    "a place": ("output_dir: ../..\n", 1, "output_dir"),
    "a search path": ("hydra:\n  searchpath: [file:///tmp]\n", 1, "hydra"),
    "an option that is a path": ("defaults:\n  - override /optimizer: ../../tmp/x\n", 2, "optimizer"),
    "the environment": ("select: ${oc.env:HOME}\n", 1, "environment"),
    "half a reference": ("select: '${a'\n", 1, "refer"),
    "an escaped reference": ("select: '\\${select}'\n", 1, "refer"),
    "references in a circle": ("optimizer:\n  lr: ${optimizer.weight_decay}\n  weight_decay: ${optimizer.lr}\n", 2, "circle"),
    "a reference to itself": ("model:\n  width: ${model}\n", 2, "circle"),
    "a list with code of a reference": (timm("kwargs:\n  img_size: ['${runtime.device}']"), 5, "img_size"),
    "a tag": ("epochs: !!python/object/apply:posix.system [ls]\n", 1, "tag"),
    "an alias": ("model: &a\n  freeze: [*a]\n", 1, "alias"),
    "a missing value": ("select: '???'\n", 1, "missing"),
    "escapes of a terminal": ('select: "\\e[2Jx"\n', 1, "printable"),
    "a text that is too long": (f"select: {'x' * 3000}\n", 1, "2000"),
    "a key that is too long": (f"{'x' * 300}: 1\n", 1, "200"),
    "a number that is too large": ("epochs: 1" + "0" * 400 + "\n", 1, "too large"),
    "a number in another notation": ("epochs: 0x" + "f" * 400 + "\n", 1, "too large"),
}  # fmt: skip


def check(path: Path) -> None:
    """The effect of `drivetrain recipe check` on a file."""
    recipe.check(recipes.read(path))


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """The imports and reads of the first config are no effect of a recipe."""
    prepare([])


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_recipe_is_refused_before_it_has_an_effect(case: str, tmp_path: Path) -> None:
    text, line, named = HOSTILE[case]
    file = tmp_path / "hostile.yaml"
    file.write_text(text)
    with limited(), watched(file, tmp_path / "recipes") as effects, pytest.raises(UserError) as refused:
        check(file)
    found = [problem for problem in refused.value.problems if problem.startswith(f"{file}:{line}: ")]
    assert found, refused.value.problems
    assert any(named in problem.removeprefix(f"{file}:{line}: ") for problem in found), found
    assert effects == []
    assert all(len(problem) < 1000 and problem.isprintable() for problem in refused.value.problems)
    assert os.listdir(tmp_path) == [file.name]


OWN = {
    "model": "model: own",
    "data": "data: own",
    "loss": "loss: own",
    "loss among others": "loss: [cross_entropy, own]",
    "metric": "metrics: [own]",
}


@pytest.mark.parametrize("case", OWN)
def test_own_code_is_the_operators_even_where_a_recipe_chooses_it(case: str, tmp_path: Path) -> None:
    """A recipe that says `own` does nothing by itself; the name of the code, and the word that trusts it, are the operator's."""
    group = OWN[case].partition(":")[0]
    file = tmp_path / "own.yaml"
    file.write_text(f"defaults:\n  - override /{OWN[case]}\n")
    with limited(), watched(file, tmp_path / "recipes") as effects:
        with pytest.raises(UserError, match=f"own.yaml:2: a recipe cannot choose '{group}=own'"):
            prepare([f"recipe={file}"])
        left = recipe.check(recipes.read(file))
    assert effects == []
    assert any(line.startswith(f"left to the command line: {file}:2: a recipe cannot choose '{group}=own'") for line in left)
    with pytest.raises(UserError) as refused:
        prepare([f"recipe={file}", f"{group}=own"])
    assert "needs " in str(refused.value)
    assert "cannot choose" not in str(refused.value)


def test_the_watch_sees_effects(tmp_path: Path) -> None:
    """So that `effects == []` above means something."""
    (tmp_path / "read").write_text("x")
    with watched() as effects:
        (tmp_path / "written").write_text("x")
        (tmp_path / "read").read_text()
        os.listdir(tmp_path)
        subprocess.run(["true"], check=True)
        socket.socket().close()
    kinds = {effect.split()[0] for effect in effects}
    assert {"writes", "reads", "os.listdir", "subprocess.Popen", "socket.__new__"} <= kinds


def test_the_command_answers_with_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hostile.yaml"
    file.write_text(HOSTILE["timm: a file from the net"][0])
    assert main(["recipe", "check", str(file)]) == 2
    assert main(["train", f"recipe={file}"]) == 2
    said = capsys.readouterr()
    assert [line.startswith(f"error: {file}:6: a recipe cannot set ") for line in said.err.splitlines()] == [True, True]
    assert os.listdir(tmp_path) == [file.name]


GOOD = {
    "timm": timm(
        "name: vit_tiny_patch16_224.augreg_in21k\nkwargs: {img_size: [32, 32], drop_path_rate: 0.1, act_layer: gelu, "
        "qkv_bias: true, global_pool: '', init_values: null}\nfreeze: [blocks.*.attn, '*.bias']\nunfreeze: {head: 0, blocks: 2ep}"
    ),
    "timm's optimizers": choose("optimizer", "timm", "name: lookahead_adamw\nkwargs: {betas: [0.9, 0.98], eps: 1e-7}"),
    "columns": choose("data", "tabular", "target: 'Größe (cm)'\ncolumns: [a b, c-d]\nvalidation: val.csv"),
    "references": "optimizer:\n  lr: 0.1\n  weight_decay: ${optimizer.lr}\n  eps: ${optimizer.weight_decay}\n",
    "multipliers": "optimizer:\n  lr_multipliers:\n    head: 10\n    blocks.*.norm?: 2\n",
    "lengths": choose("scheduler", "cosine", "warmup: 2ep\nlength: 0.5"),
}


@pytest.mark.parametrize("case", GOOD)
def test_what_a_recipe_may_say_of_these_is_not_refused(case: str, tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD[case])
    problems: list[str] = []
    try:
        check(file)
    except UserError as error:
        problems = error.problems
    assert [p for p in problems if "data.path" not in p and "data.validation" not in p] == [], "a table is the operator's to name"


# --- what is the operator's, in a run's own files ---


def test_the_command_line_may_give_any_value_and_a_run_keeps_it_out_of_its_recipe(tmp_path: Path) -> None:
    words = ["model=timm", "model.name=resnet10t", "model.kwargs.cache_dir=there", "model.kwargs.drop_rate=0.1"]
    job, without = prepare(words), prepare([*words[:2], words[3]])
    assert {"model.kwargs.cache_dir"} == job.machine_local_keys - without.machine_local_keys
    assert job.config_hash != without.config_hash, "it makes another run all the same"
    (tmp_path / "run").mkdir()
    job.write_files(tmp_path / "run")
    lines = (tmp_path / "run" / "recipe.yaml").read_text().splitlines()
    assert [line for line in lines if "cache_dir" in line and not line.startswith(("#", "left_out:"))] == []
    assert any("drop_rate: 0.1" in line for line in lines)
    check(tmp_path / "run" / "recipe.yaml")
    again = prepare([f"resume={tmp_path / 'run'}"])
    assert again.run.model.kwargs == job.run.model.kwargs == {"cache_dir": "there", "drop_rate": 0.1}
    assert again.config_hash == job.config_hash


def test_a_runs_own_recipe_is_held_to_the_same(tmp_path: Path) -> None:
    """Whoever sends a run's folder has written its recipe.yaml too."""
    file = tmp_path / "recipe.yaml"
    file.write_text(timm("kwargs:\n  checkpoint_path: x"))
    with pytest.raises(UserError, match="checkpoint_path"):
        checked(compose([], base=recipes.read(file)), own=True)


def test_a_teachers_config_is_held_to_the_same(tmp_path: Path) -> None:
    """A distilled run builds its teacher as the config.yaml in the teacher's folder says, which may be a stranger's."""
    config = {"model": {"_target_": "drivetrain.model.timm.Timm", "name": "resnet18", "kwargs": {"checkpoint_path": "x"}}}
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(config))
    context: Any = SimpleNamespace(run=SimpleNamespace(values={"trust": []}))
    with pytest.raises(UserError, match=r"model\.kwargs\.checkpoint_path"):
        distill.trained_model(tmp_path, "loss.teacher", context)


# --- the rules themselves ---


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (str, [1, None, [1]], ["a", {"a": 1}]),
        (str | None, [None], ["a"]),
        (list[str], [[], [1]], [["a"]]),
        (Any, [1.5, [True]], ["a", {"a": 1}, [{"a": 1}]]),
        (dict[str, Any], [{}], [{"a": 1}]),
        (Literal["a", "b"], ["a", "c"], []),  # another text is of the wrong type, which is told elsewhere
        (Literal["auto"] | allowed.FileName, ["auto", "val.csv"], ["../val", "/etc", "a/b", ".hidden", ""]),
        (allowed.Name, ["loss_a"], ["a-b", "a b", "", "1a", "a\n"]),
        (allowed.NamePattern, ["blocks.*.norm?"], ["a b", "a/b", ""]),
        (list[allowed.ColumnName] | None, [["Größe (cm)"], None], [["a/b"], ["http://a"], ["a\x1b"]]),
        (Annotated[dict[str, Any], Entries(one_of("a", "b"), ((one_of("b"), one_of("x")),))],
         [{"a": 1}, {"b": "x"}, {"a": [1, 2.5]}], [{"a": "x"}, {"c": 1}, {"b": {"x": 1}}, {"a": 10**7}, {"a": float("nan")}]),
    ],
)  # fmt: skip
def test_rules(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if allowed.problem(hint, value)] == []
    assert [value for value in bad if not allowed.problem(hint, value)] == []


def test_an_entry_is_held_to_its_mappings_rule() -> None:
    hint = Annotated[dict[str, Any], Entries(Text(r"a", "a"))]
    assert allowed.problem(hint, 1, "a") == ""
    assert "'a.b'" in allowed.problem(hint, 1, "a.b")
    assert allowed.problem(dict[str, Any], 1, "a") != ""


# --- every option that ships ---


def test_the_contract_asks_for_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting whose annotation leaves its text open fails the contract test, which every option is held to."""
    cls = import_name("drivetrain.stop.base.Early")
    annotations = {**inspect.get_annotations(cls.__init__), "metric": "str | None"}
    monkeypatch.setattr(cls.__init__, "__annotations__", annotations)
    schema._of.cache_clear()
    problems = contract_problems("stop", "early")
    monkeypatch.undo()
    schema._of.cache_clear()
    assert len(problems) == 1
    assert "metric of Early may be any text" in problems[0]
    assert contract_problems("stop", "early") == []


def test_a_recipe_may_hold_each_options_own_values() -> None:
    for group, option, file in ((group, *row) for group, files in option_files().items() for row in files.items()):
        section: Any = OmegaConf.to_container(OmegaConf.load(file))
        if group not in OPERATOR_KEYS:
            found = recipe_checks.not_for_recipes({"x": section}, {"x": import_name(section["_target_"])})
            assert list(found) == [], (group, option)


# --- timm's own lists ---


@pytest.mark.slow
def test_the_arguments_that_a_recipe_may_set_are_none_of_timms_factory() -> None:
    """create_model and build_model_with_cfg read paths, addresses and caches: none of these has a name on the list."""
    from timm.models import _builder, _factory

    from drivetrain.model.timm import NAMES, NUMBERS

    functions = (_factory.create_model, _factory._resolve_model_source, _builder.build_model_with_cfg, _builder.load_pretrained)
    of_factory = {name for function in functions for name in inspect.signature(function).parameters}
    of_factory |= set(_builder._PRETRAINED_SOURCE_KEYS) if hasattr(_builder, "_PRETRAINED_SOURCE_KEYS") else set()
    assert {*NUMBERS.split(), *NAMES} & of_factory == {"in_chans", "num_classes"}


@pytest.mark.slow
def test_the_names_that_a_recipe_may_give_are_timms() -> None:
    import timm
    from timm.layers import get_act_layer, get_norm_layer

    from drivetrain.model.timm import ACTIVATIONS, NORM_LAYERS, Timm

    assert all(get_act_layer(name) for name in ACTIVATIONS.split())
    assert all(get_norm_layer(name) for name in NORM_LAYERS.split())
    hint = inspect.get_annotations(Timm, eval_str=True)["name"]
    assert [name for name in timm.list_models(pretrained=True) + timm.list_models() if allowed.problem(hint, name)] == []


# --- the working directory ---

PLANTED = ("colorsys", "torch", "timm", "yaml", "omegaconf", "hydra", "pydantic", "apex", "torchao", "datasets", "sitecustomize")
CHECK_THEN_IMPORT = """
import runpy, sys
sys.argv = ["drivetrain", "recipe", "check", "mine.yaml"]
try:
    runpy.run_module("drivetrain", run_name="__main__")
except SystemExit as end:
    import colorsys
    print(end.code, colorsys.__file__)
"""


@pytest.mark.own_process
def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    """A stranger's folder with modules of well-known names: a command that is started in it does not run them."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("open('PWNED', 'w').close()\n")
    (tmp_path / "mine.yaml").write_text("epochs: 1\n")
    before = sorted(os.listdir(tmp_path))
    done = run(cwd=tmp_path, how=("-c", CHECK_THEN_IMPORT))  # Python puts the working directory first, as for `-m drivetrain`
    assert done.out.splitlines() == ["mine.yaml: valid", f"0 {inspect.getfile(colorsys)}"], done
    assert sorted(os.listdir(tmp_path)) == before
