"""The written form of a recipe: every setting is in it, it is read as it was, changes are told, and its schema agrees."""

import functools
import itertools
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain.cli import main, recipe
from drivetrain.cli.recipe_schema import NAMES_CODE, recipe_schema
from drivetrain.config import validate
from drivetrain.config.catalog import LISTS, SUMS, options
from drivetrain.config.compose import compose
from drivetrain.config.composed import Composed
from drivetrain.core.errors import UserError
from drivetrain.core.machine import paths, process
from drivetrain.core.machine.paths import recipes_dir
from drivetrain.launch.job import checked, prepare
from drivetrain.recipe import reader, write
from drivetrain.run import recipe_file
from drivetrain.run.recipe_file import to_recipe
from tests.support.refusals import problems_of


def text_of(composed: Composed) -> str:
    local = recipe_file.keys_of_machine(composed.plain)
    assert local is not None
    return to_recipe(composed, local)


def exported(*words: str, name: str = "shared.yaml") -> Path:
    """The recipe of a run with these words, in a file."""
    Path(name).write_text(text_of(compose(words)))
    return Path(name)


def taken(text: str) -> reader.Recipe:
    return reader.read(Path("mine.yaml"), text.encode())


def text_of_run(text: str) -> str:
    """The recipe that a run of this one writes."""
    job = checked(compose([], base=taken(text)))
    return recipe_file.to_recipe(job.composed, job.machine_local_keys, validate.identifying_keys(job.run))


def settings(composed: Composed) -> dict[str, Any]:
    """The settings of a config that a recipe may set."""
    local = recipe_file.keys_of_machine(composed.plain)
    assert local is not None
    return recipe_file.settable(composed, local)


def edited(file: Path, *replaced: tuple[str, str]) -> Path:
    text = file.read_text()
    for old, new in replaced:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in\n{text}"
        text = text.replace(old, new)
    file.write_text(text)
    return file


def said(*words: str) -> str:
    """The notices of a run of these words when it starts."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("drivetrain.launch.job"), "warning", lambda form, line: lines.append(line))
        prepare([*words]).log_notices()
    return "\n".join(lines)


# --- what is written ---


def test_what_was_chosen_comes_first_and_every_other_setting_after_it():
    file = exported("precision=bf16", "optimizer.lr=0.02", "epochs=3")
    tree = yaml.safe_load(file.read_text())
    assert list(tree) == ["schema", "drivetrain", "hash", "defaults", "optimizer", "epochs", "unchanged"]
    assert (tree["schema"], tree["drivetrain"]) == (write.SCHEMA, process.__version__)
    assert (tree["defaults"], tree["optimizer"], tree["epochs"]) == ([{"override /precision": "bf16"}], {"lr": 0.02}, 3)
    recipe = reader.read(file)
    assert {k for k in (*recipe.choices, *recipe.values) if recipe.values.get(k) != {}} == set(settings(compose([])))
    assert recipe.unchanged == {*recipe.choices, *recipe.values} - {"precision", "optimizer.lr", "epochs"}


def test_a_tasks_own_options_and_values_are_defaults_too():
    tree = yaml.safe_load(exported("task=segmentation", "model.depth=3").read_text())
    assert (tree["defaults"], tree["model"]) == ([{"override /task": "segmentation"}], {"depth": 3})
    assert {"override /model": "unet"} in tree["unchanged"]["defaults"]
    assert tree["unchanged"]["model"]["width"] == 12


ROWS = range(max(len(names) for group, names in options().items() if group not in LISTS))


@pytest.mark.parametrize("row", ROWS)
def test_every_option_is_read_back_as_it_was(row: int):
    """The n-th option of each group, or all of a group that takes several."""
    words = [f"{g}={names[row % len(names)]}" for g, names in options().items() if g not in LISTS]
    if row == 0:
        words = [f"{g}=[{','.join(n for n in names if n != 'none')}]" for g, names in options().items() if g in (*LISTS, *SUMS)]
    first = compose(words)
    assert first.problems == []
    file = Path("row.yaml")
    file.write_text(text_of(first))
    recipe = reader.read(file)
    second = compose([], base=recipe)
    assert second.problems == []
    assert settings(second) == settings(first)
    assert recipe_file.digest(settings(second)) == recipe.header.hash
    if row == 0:
        assert text_of(second) == file.read_text()


TEXTS = [
    "1e5", "1.5e-3", "0x1f", "1_000", "12:30:45", "2026-11-23", "yes", "on", "null", "~", "", " a ", "a: b", "# no",
    "- a", "=", "<<", "|", ">", "[a]", "{a}", "it's", '"', "é", "*", "&a", "!a", "%", "@", "`",
    "5ep", "1.0", "00", "+1", ".inf", "a" * 300,
]  # fmt: skip
NUMBERS = [0, 1, -1, 10**15, 0.1, 1.0, 1e-5, 1e22, 1.5e-300, -0.0, True, False, None]


def test_values_are_read_back_as_they_were():
    given = {f"model.kwargs.k{n}": value for n, value in enumerate([*TEXTS, *NUMBERS, TEXTS, NUMBERS, [[1, "1"], []], {}])}
    given |= {f"optimizer.lr_multipliers.{key}": 2 for key in ("*.bias", "0", "on", "null", "1e5", "layers.0.weight")}
    given |= {"model.unfreeze.head": "2ep", "model.unfreeze.head.bias": 0.5}  # a value, and one below it
    Path("a.yaml").write_text(write.block(write.nested(given)))
    found = reader.read(Path("a.yaml")).values
    assert found == given
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in given.items()}
    for value in given.values():
        Path("a.yaml").write_text(f"a: {write.flow(value)}\n")
        assert reader.read(Path("a.yaml")).values["a"] == value


def test_the_environment_is_not_written(monkeypatch):
    monkeypatch.setenv("LR", "0.0123")
    words = [
        "optimizer.lr=${oc.env:LR}",
        "scheduler.warmup='${optimizer.weight_decay}'",
        "ema=ema",
        "ema.decay='${optimizer.lr}'",
    ]
    composed = compose(words)
    assert composed.plain["ema"]["decay"] == composed.plain["optimizer"]["lr"] == "0.0123"
    file = Path("shared.yaml")
    file.write_text(text_of(composed))
    assert "0.0123" not in file.read_text()
    assert "# optimizer.lr came from the environment" in file.read_text()
    recipe = reader.read(file)
    assert recipe.header.left_out == {"optimizer.lr"}
    assert recipe.values["scheduler.warmup"] == "${optimizer.weight_decay}"
    assert list(recipe_file.notices(recipe)) == []
    monkeypatch.setenv("LR", "0.5")
    assert text_of(compose(words)) == file.read_text(), "not even the hash tells of it"
    assert compose([f"recipe={file}"]).plain["scheduler"]["warmup"] == compose([]).plain["optimizer"]["weight_decay"]


def test_the_hash_is_the_same_in_any_order_and_on_any_machine():
    one = {"optimizer": "sgd", "optimizer.lr": 1.0, "model.hidden": [8, 2.0], "model.kwargs": {}}
    other = {"model.kwargs": {}, "model.hidden": [8.0, 2], "optimizer.lr": 1, "optimizer": "sgd"}
    assert recipe_file.digest(one) == recipe_file.digest(other) == "00337067a92aaccf"
    assert recipe_file.digest(one) != recipe_file.digest({**one, "optimizer.lr": True})
    here = exported("runtime.device=cpu", "runtime.threads=1", "output_dir=here", "logger=[]", name="here.yaml")
    assert here.read_text() == exported("data.root=there", "data=cifar10", "data=digits", name="there.yaml").read_text()


def test_what_is_written_as_a_person_reads_it_is_read() -> None:
    """What looks otherwise than YAML reads it is refused: see tests/cli/test_errors.py."""
    found = taken("description: 'at 1:30'\noptimizer: {lr: 0.05, weight_decay: -0.0}\nepochs: 10\n")
    assert found.values["epochs"] == 10
    assert taken("\ufeffepochs: 3\r\n# a\u00a0b\r\n").values == {"epochs": 3}


def test_a_description_survives_a_run() -> None:
    """A run's recipe must be readable, else the run cannot be resumed."""
    text = 'description: "fast \N{ROCKET} \\"é\\"\\nand small"\n'
    assert taken(text_of_run(text)).description == taken(text).description


def test_the_hash_is_of_what_left_out_names_too_where_the_file_sets_it() -> None:
    text = text_of_run("").replace("\nunchanged:", "\nleft_out: [optimizer]\n\nunchanged:", 1)
    without = taken(text).only_chosen()
    settings = compose([], base=without)
    digest = recipe_file.digest(recipe_file.settable(settings, recipe_file.keys_of_machine(settings.plain) or (), ["optimizer"]))
    text = text.replace(str(taken(text).header.hash), digest)
    assert any("was" in line or "were" in line for line in recipe_file.notices(taken(text)))


def test_a_check_of_a_whole_recipe_says_nothing_more() -> None:
    assert recipe.check(taken(text_of_run(""))) == []


# --- what is read ---


@pytest.mark.parametrize(
    ("text", "at", "told"),
    [
        ("schema: banana", 1, "schema: banana must be a whole number from 1"),
        ("epochs: 1\nschema: 0", 2, "schema: 0 must be a whole number from 1"),
        ("schema: [1]", 1, "schema: must be a whole number from 1"),
        ("schema: 1\nhash: 12", 2, "hash: 12 must be 16 hex digits"),
        ("schema: 1\nhash: {a: b}", 2, "hash: must be 16 hex digits"),
        ("schema: 1\ndrivetrain: '0.1; rm'", 2, "drivetrain: 0.1; rm must be a version"),
        ("schema: 1\nleft_out: model", 2, "left_out: model must be a list of groups and keys"),
        ("schema: 1\nleft_out: [a, {b: c}]", 2, "left_out: must be a list of groups and keys"),
        ("epochs: 1\nhash: '0123456789abcdef'", 2, "hash: means nothing without the schema"),
        ("epochs: 1\nunchanged: 3", 2, "unchanged: must be a mapping"),
        ("unchanged:\n  sweep: {epochs: [1]}", 2, "'sweep' belongs outside of unchanged:"),
        ("unchanged:\n  trust: [a]", 2, "a recipe cannot set 'trust'"),
        ("unchanged:\n  optimizer: {_target_: a.b}", 2, "never a target"),
        ("unchanged:\n  defaults:\n  - override /model: ../x", 3, "is not the name of an option"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, at: int, told: str):
    file = Path("wrong.yaml")
    file.write_text(f"{text}\n")
    (problem,) = problems_of(reader.read, file)
    assert problem.startswith(f"{file}:{at}: ")
    assert told in problem


def test_a_newer_form_is_refused_before_anything_else():
    Path("newer.yaml").write_text("anything: {new: 1}\nschema: 7\ndrivetrain: 3.2.1\nclaim: 3\n")
    told = r"newer\.yaml:2: schema: 7: drivetrain 3\.2\.1 wrote .* newer form.*'drivetrain>=3\.2\.1'$"
    with pytest.raises(UserError, match=told):
        prepare(["recipe=newer.yaml"])


# --- a default that changed ---


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`conf(file, old, new)` changes a file of conf/, as in another clone of drivetrain."""
    copy = tmp_path / "clone" / "conf"
    shutil.copytree(paths.conf_dir(), copy)
    shipped = paths._shipped
    monkeypatch.setattr(paths, "_shipped", lambda name: copy if name == "conf" else shipped(name))

    def forget() -> None:
        for name, module in [*sys.modules.items()]:
            if name.startswith(("drivetrain.config", "tests.support.composed")):
                for cached in [value for value in vars(module).values() if hasattr(value, "cache_clear")]:
                    cached.cache_clear()

    def change(file: str, old: str, new: str) -> None:
        edited(copy / file, (old, new))
        forget()

    yield change
    forget()


def test_a_receiver_with_other_defaults_trains_the_same_weights(tiny, conf, tmp_path: Path):
    """The sender's run, and a clone in which options, values, a setting and a whole preset are other ones."""
    import drivetrain
    from tests.support.command import weights

    sent = drivetrain.train([*tiny("epochs=1"), "output_dir=sender"])
    recipe = sent.run_dir / "recipe.yaml"
    conf("config.yaml", "- optimizer: adamw", "- optimizer: lion")
    conf("config.yaml", "- precision: fp32", "- precision: bf16")
    conf("config.yaml", "log_every: 20 ", "log_every: 7 ")
    conf("optimizer/sgd.yaml", "momentum: 0.9", "momentum: 0.5")
    conf("model/mlp.yaml", "dropout: 0.0", "dropout: 0.3")
    conf("runtime/default.yaml", "seed: 0", "seed: 5")
    got = drivetrain.train([f"recipe={recipe}", "output_dir=receiver"])
    assert got.config_hash == sent.config_hash
    assert weights(got.run_dir) == weights(sent.run_dir)
    assert not said(f"recipe={recipe}")
    assert prepare(tiny("epochs=1")).config_hash != sent.config_hash, "the same words have become another run"


def test_a_setting_that_a_recipe_does_not_spell_out_is_told_if_its_default_changed(conf):
    file = edited(exported("optimizer=sgd"), ("    momentum: 0.9\n", ""))
    assert not said(f"recipe={file}"), "the default is what it was"
    conf("optimizer/sgd.yaml", "momentum: 0.9", "momentum: 0.5")
    (line,) = said(f"recipe={file}").splitlines()
    assert f"drivetrain {process.__version__} wrote it for another config" in line
    assert "optimizer.momentum=0.5" in line
    assert line.count("=") == 1, "nothing else differs"
    assert compose([f"recipe={file}"]).plain["optimizer"]["momentum"] == 0.5


def test_a_line_that_was_deleted_or_changed_is_told(says):
    file = edited(exported("optimizer=sgd", "optimizer.lr=0.3"), ("  lr: 0.3\n", "  nesterov: false\n"))
    (line,) = said(f"recipe={file}").splitlines()
    assert "optimizer.lr=0.1" in line
    file = edited(exported("optimizer=sgd", "optimizer.lr=0.3"), ("  lr: 0.3\n", "  lr: 0.4\n"))
    assert "its options or values were changed since" in said(f"recipe={file}")
    assert "changed since" in says("recipe", "check", file)
    assert "changed since" in said(f"recipe={file}", "optimizer.lr=0.3"), "the file is what it is"
    file = edited(exported(), ("    - override /precision: fp32\n", ""))
    assert not said(f"recipe={file}")


def test_a_setting_that_appeared_or_is_gone_is_told(conf):
    file = exported("optimizer=sgd", "optimizer.nesterov=false")
    conf("optimizer/sgd.yaml", "weight_decay: 0.0005", "decay: 0.0005")
    notices = compose([f"recipe={file}"]).notices
    assert len(notices) == 1
    assert "optimizer.weight_decay=0.0005 cannot be set any more" in notices[0]
    assert notices[0].startswith(f"{file}:")
    (line,) = recipe_file.notices(reader.read(file))
    assert "optimizer.decay=0.0005" in line
    conf("optimizer/sgd.yaml", "nesterov: true", "nag: true")
    assert any("optimizer.nesterov=False" in p or "no 'nesterov'" in p for p in compose([f"recipe={file}"]).problems)


def test_a_group_that_the_recipe_leaves_out_is_the_command_lines():
    composed = compose(["saving=none", "optimizer=sgd"])
    local = recipe_file.keys_of_machine(composed.plain)
    assert local is not None
    file = Path("shared.yaml")
    file.write_text(to_recipe(composed, local | {"saving"}, sections="# a claim\n"))
    assert reader.read(file).header.left_out == {"saving"}
    assert "saving" not in reader.read(file).choices
    for words in ([], ["saving=best"]):
        assert not said(f"recipe={file}", *words)
    for key in ("optimizer.lr", "optimizer.lr_multipliers.head", "model.weights"):  # what only the operator may give
        other = compose(["optimizer.lr=0.3", "optimizer.lr_multipliers={head: 2}"])
        Path("other.yaml").write_text(to_recipe(other, local | {key}))
        recipe = reader.read(Path("other.yaml"))
        assert recipe.header.left_out == {key} - {"model.weights"}, "no recipe says this one anyway"
        assert key not in recipe.values
        assert list(recipe_file.notices(recipe)) == []
    text = write.with_section(file.read_text(), "# a second\n")
    assert text == file.read_text().replace("# a claim\n", "# a claim\n# a second\n")
    assert write.with_section("epochs: 1\n", "# at the end\n") == "epochs: 1\n# at the end\n"
    assert text.index("override /optimizer: sgd") < text.index("# a claim") < text.index("unchanged:")


# --- beside the command line ---


def test_another_option_takes_its_own_defaults_without_a_word():
    file = exported("optimizer=sgd", "augment=[flip_crop,mixup]", "augment.mixup.alpha=0.4")
    alone = compose(["optimizer=adamw", "augment=[mixup]", "augment.mixup.alpha=0.4"])
    both = compose([f"recipe={file}", "optimizer=adamw", "augment=[mixup]"])
    assert both.problems == []
    assert settings(both) == settings(alone)
    assert [n for n in both.notices if "optimizer" in n] == []
    (line,) = both.notices
    assert "keeps augment.mixup.alpha=0.4" in line
    file = exported("optimizer=sgd", "optimizer.lr=0.3", "optimizer.nesterov=false")
    both = compose([f"recipe={file}", "optimizer=adamw"])
    assert settings(both) == settings(compose(["optimizer=adamw", "optimizer.lr=0.3"]))
    (line,) = both.notices
    assert line.endswith("the run keeps optimizer.lr=0.3 and leaves out optimizer.nesterov")


def test_another_task_has_its_own_defaults():
    file = exported("task=segmentation", "epochs=3")
    both = compose([f"recipe={file}", "task=regression"])
    assert settings(both) == settings(compose(["task=regression", "epochs=3"]))
    assert len(both.notices) == 1


def test_a_file_that_was_edited_by_hand_means_what_it_says():
    """The settings above go before `unchanged`, and another option there has its own defaults."""
    file = edited(exported("epochs=3"), ("epochs: 3\n", "epochs: 3\noptimizer:\n  lr: 0.5\n"))
    assert compose([f"recipe={file}"]).plain["optimizer"]["lr"] == 0.5
    file = edited(exported("precision=bf16"), ("/precision: bf16\n", "/precision: bf16\n  - override /optimizer: sgd\n"))
    assert settings(compose([f"recipe={file}"])) == settings(compose(["precision=bf16", "optimizer=sgd"]))
    file = edited(exported("epochs=3"), ("epochs: 3\n", "sweep:\n  optimizer: [sgd, adamw]\n"))
    cells = [compose([], base=cell) for _, cell in reader.read(file).cells(options())]
    assert [c.problems for c in cells] == [[], []]
    assert [settings(c) for c in cells] == [settings(compose([f"optimizer={name}"])) for name in ("sgd", "adamw")]
    assert list(itertools.chain(*(recipe_file.notices(c.recipe) for c in cells))) == []


def test_a_recipe_needs_no_header():
    Path("mine.yaml").write_text("epochs: 2\n")
    assert not said("recipe=mine.yaml")
    assert compose(["recipe=mine.yaml"]).plain == compose(["epochs=2"]).plain


# --- `drivetrain recipe schema`: what it accepts and refuses is what drivetrain does ---


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


def test_the_command_writes_it(says, monkeypatch, refused):
    monkeypatch.setattr("drivetrain.cli.recipe_schema.recipe_schema", lambda dirs: {"given": dirs})
    printed = says("recipe", "schema")
    assert json.loads(printed) == {"given": []}
    assert main.main(["recipe", "schema", "recipe.schema.json"]) == 0
    assert Path("recipe.schema.json").read_text() == printed
    assert "mine.yaml" in refused("recipe", "schema", "mine.yaml"), "a recipe is not overwritten"


def test_the_users_own_options_are_in_it():
    """Without trust their code is not imported: the names are checked, and the values are not."""
    folder = str(OUR_ROOT / "examples" / "extending" / "conf")
    schema = recipe_schema([folder])
    assert schema["$defs"]["augment.invert"]["properties"]["probability"] == {
        "default": 0.5,
        "description": "of a sample to be inverted",
    }
