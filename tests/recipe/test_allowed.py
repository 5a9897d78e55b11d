"""A recipe may be a stranger's: what it holds is of a list, in bounds, or refused before it has an effect."""

import inspect
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
import yaml
from omegaconf import OmegaConf

from drivetrain.cli import recipe
from drivetrain.config import recipe_checks, schema
from drivetrain.config.catalog import LISTS, option_files
from drivetrain.config.compose import compose
from drivetrain.core.errors import UserError
from drivetrain.core.machine import nvidia_driver
from drivetrain.core.machine.paths import recipes_dir
from drivetrain.core.options import allowed
from drivetrain.core.options.allowed import Entries, Text, one_of
from drivetrain.core.user.code import import_name
from drivetrain.launch.job import checked, prepare
from drivetrain.loss import distill
from drivetrain.recipe import reader as recipes
from drivetrain.recipe.safe_yaml import OPERATOR_KEYS
from drivetrain.testing import contract_problems
from tests.support import odd
from tests.support.effects import limited, watched
from tests.support.put import put
from tests.support.recipe_mutants import FILES, alike, mutants, written


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
    "references that multiply": (
        timm(f"kwargs:\n  a: {'x' * 100}\n  b: {'${model.kwargs.a}' * 20}\n  c: {'${model.kwargs.b}' * 20}"), 7, "too far",
    ),
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
    file = put(tmp_path / "hostile.yaml", text)
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
    file = put(tmp_path / "own.yaml", f"defaults:\n  - override /{OWN[case]}\n")
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


def test_the_command_answers_with_one_line_and_exit_code_2(tmp_path: Path, refused: Callable[..., str]) -> None:
    file = put(tmp_path / "hostile.yaml", HOSTILE["timm: a file from the net"][0])
    for words in (("recipe", "check", file), ("train", f"recipe={file}")):
        (line,) = refused(*words).splitlines()
        assert line.startswith(f"error: {file}:6: a recipe cannot set ")


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
    file = put(tmp_path / "good.yaml", GOOD[case])
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
    file = put(tmp_path / "recipe.yaml", timm("kwargs:\n  checkpoint_path: x"))
    with pytest.raises(UserError, match="checkpoint_path"):
        checked(compose([], base=recipes.read(file)), own=True)


def test_a_teachers_config_is_held_to_the_same(tmp_path: Path) -> None:
    """A distilled run builds its teacher as the config.yaml in the teacher's folder says, which may be a stranger's."""
    config = {"model": {"_target_": "drivetrain.model.timm.TimmModel", "name": "resnet18", "kwargs": {"checkpoint_path": "x"}}}
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
    for group, option, file in ((group, *row) for group, found in option_files().items() for row in found.items()):
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

    from drivetrain.model.timm import ACTIVATIONS, NORM_LAYERS, TimmModel

    assert all(get_act_layer(name) for name in ACTIVATIONS.split())
    assert all(get_norm_layer(name) for name in NORM_LAYERS.split())
    hint = inspect.get_annotations(TimmModel, eval_str=True)["name"]
    assert [name for name in timm.list_models(pretrained=True) + timm.list_models() if allowed.problem(hint, name)] == []


# --- bounds of the work that a recipe can ask for ---


def test_a_file_that_is_no_plain_file_or_has_no_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    with (tmp_path / "sparse.yaml").open("w") as sparse:
        sparse.truncate(6 << 30)
    (tmp_path / "latin.yaml").write_bytes("defaults: []  # caf\xe9\n".encode("latin-1"))
    refusals = {
        "latin": "is not UTF-8 text",
        "fifo": "not a regular file",
        "zero": "not a regular file",
        "sparse": "larger than 64 KiB",
        "none": "cannot be read",
    }
    for name, said in refusals.items():
        with limited(), pytest.raises(UserError, match=said):
            recipes.read(tmp_path / f"{name}.yaml")


# --- the reader and the validation of recipes, fuzzed: a valid config or a UserError, no traceback, no effect, no long wait ---


def outcome(file: Path, text: str, most_said: int = odd.MOST_SAID) -> str:
    """Check a recipe as `drivetrain recipe check` does."""
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return odd.outcome(lambda: recipe.check(recipes.read(file)), file, Path("recipes"), most_said=most_said)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvidia_driver, "installed", lambda: False)  # parallel=dp asks the machine for its devices, by a process
        prepare([])  # what the first config imports and reads is no effect of a recipe, and none of its time
        recipe.check(recipes.read(recipes_dir() / "articles_ladder.yaml"))
        yield tmp_path_factory.mktemp("fuzz")


@odd.fuzz
def test_mutants_of_recipes(place: Path) -> None:
    odd.tried(mutants(), lambda text: outcome(place / "recipe.yaml", text), ["description: what ships, unchanged\n"])


@pytest.mark.slow
@pytest.mark.parametrize("group", [group for group in FILES if group != "logger"])
def test_each_setting_of_each_option_with_extreme_values(group: str, place: Path) -> None:
    for option, content in FILES[group].items():
        chosen = [option] if group in LISTS else option
        for setting in sorted({*content} - {"_target_", "preset"}):
            key = f"{group}.{f'{option}.' if group in LISTS else ''}{setting}"
            for value in alike(content[setting]):
                recipe = {"defaults": [{f"override /{group}": chosen}], key: value}
                outcome(place / "recipe.yaml", "\n".join(written(recipe, 0)) + "\n")


def swept(**axes: list[object]) -> str:
    return yaml.safe_dump({"sweep": axes})


SIX_LEVELS = range(1, 7)
BOMBS = {
    "references, six levels": "model.unfreeze.a0: x\n"
    + "".join(f"model.unfreeze.a{n}: '{f'${{model.unfreeze.a{n - 1}}}' * 30}'\n" for n in SIX_LEVELS),
    "references in lists": "model.unfreeze.a0: 1\n"
    + "".join(f"model.unfreeze.a{n}: [{', '.join([f'${{model.unfreeze.a{n - 1}}}'] * 30)}]\n" for n in SIX_LEVELS),
    "a chain of references": "".join(f"model.unfreeze.a{n}: ${{model.unfreeze.a{n + 1}}}\n" for n in range(400)),
    "a chain, its end first": "".join(f"model.unfreeze.a{n}: ${{model.unfreeze.a{n + 1}}}\n" for n in reversed(range(400))),
    "cycles": "defaults:\n  - override /scheduler: cosine\nscheduler:\n  cycles: 1000000000000\n",
    "cycles beyond all numbers": "defaults:\n  - override /scheduler: cosine\nscheduler:\n  cycles: 9\n  cycle_mult: 1.0e+300\n",
    "epochs": "epochs: 1000000000000\n",
    "epochs of a growing batch": "epochs: 1000000\nbatch:\n  grow_every: 1\ndata:\n  drop_last: false\n",
    "a batch that grows for ever": "epochs: 1000000\nbatch:\n  grow_every: 100000000000\n  grow_by: 1000000000000\n",
    "many combinations": swept(precision=["fp32", "bf16"], optimizer=["sgd", "lion"], epochs=list(range(1, 200))),
    "too many combinations": swept(epochs=list(range(1, 900)), updates=[1, 2]),
    "a folder that nobody named": "defaults:\n  - override /data: packed\n",
    "brackets": "a: " + "[" * 60_000,
    "braces": "a: " + "{" * 60_000,
    "keys": "".join(f"? a{n}\n" for n in range(9000)),
    "dashes": "- " * 30_000,
    "a long line": "description: " + "x " * 30_000,
    "a long key": "x" * 60_000 + ": 1",
    "dots": "a" + ".a" * 30_000 + ": 1",
    "quotes": "a: " + "'" * 60_001,
    "a pattern": "optimizer:\n  no_weight_decay: ['" + "*a" * 90 + "']\n",
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_file_is_little_work(case: str, place: Path) -> None:
    outcome(place / "recipe.yaml", BOMBS[case], most_said=10**6)  # each of its lines may be refused
