"""The command's other words: help, lists, recipes, the composed config, completion, an own config dir, a bare checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import drivetrain
from drivetrain.cli import completion, main, recipe
from drivetrain.cli.verbs import VERBS, Verb
from drivetrain.config import catalog
from drivetrain.config.catalog import root_config
from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from drivetrain.recipe import reader
from tests.support.command import (
    OWN,
    ROOT,
    SRC_TRAIN,
    TINY,
    Done,
    empty,
    environment,
    only_run,
    result,
    run,
    runs,
    strict_json,
    train,
    weights,
    with_own_nets,
)  # fmt: skip
from tests.support.put import put

GROUPS = {p.name: sorted(f.stem for f in p.glob("[!_]*.yaml")) for p in sorted((ROOT / "conf").iterdir()) if p.is_dir()}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def good(done: Done) -> str:
    """The output of a command that ended with exit 0 and without a word on standard error."""
    assert (done.code, done.err) == (0, ""), done
    assert done.out.strip()
    assert not CONTROL.search(done.out), "plain text where it is no terminal"
    return done.out


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """A command in this process, as it ends and what it says."""

    def run(*words: str) -> Done:
        capsys.readouterr()
        return Done(main.main([*words]), *capsys.readouterr())

    return run


OVERVIEW = tuple(f"drivetrain {verb}" for verb in ("train", "list", "recipe", "completion"))
OF_CHECKOUT = ("train", "--help")
OF_TRAIN = ("--multirun", "--cfg job", "--config-dir", "--quiet", "resume=", "75 interrupted", *GROUPS)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        *((words, OVERVIEW) for words in ((), ("--help",), ("-h",), ("help",))),
        (("--version",), (f"drivetrain {drivetrain.__version__}\n",)),
        (OF_CHECKOUT, OF_TRAIN),
        (("train", "-h"), OF_TRAIN),
        (("recipe", "verify", "-h"), ("drivetrain recipe diff ", "exit codes of verify")),
        (("bisect", "--help"), ("bisect GOOD BAD",)),
        (("certify", "--help"), ("exit codes",)),
        (("predict", "--help"), ("--data test",)),
        (("completion", "--help"), ('eval "$(drivetrain completion zsh)"',)),
    ],
)
def test_help(words: tuple[str, ...], names: tuple[str, ...], here: Callable[..., Done]) -> None:
    said = good(here(*words))
    assert not [name for name in names if name not in said]
    if words == OF_CHECKOUT:
        assert said == good(run(words[1], cwd=ROOT, how=SRC_TRAIN)), "the same from the checkout"


@pytest.mark.parametrize("name", [verb.name for verb in VERBS.values() if verb.help])
def test_every_verb_has_a_page_of_help(name: str, here: Callable[..., Done]) -> None:
    assert good(here(name, "--help")).startswith(f"drivetrain {name}")


def test_list(here: Callable[..., Done]) -> None:
    """A line for each option of every group, or of one; the help of train has their names, and fits a screen."""
    names, whole = good(here("train", "--help")), good(here("list"))
    assert len(names.splitlines()) <= 60
    for group, options in GROUPS.items():
        rows = [line.split() for line in good(here("list", group)).splitlines()]
        assert [option for option in options if not any(option in row[:2] and len(row) >= 3 for row in rows)] == []
        assert all(re.search(rf"\b{word}\b", whole) for word in (group, *options))
        chosen = catalog.default_options()[group]
        first = (sorted(chosen) or options)[0] if group in catalog.LISTS else chosen
        assert re.search(rf"^  {group} +{re.escape(first)}", names, re.M)
        assert all(re.search(rf"\b{option}\b", names) for option in options)


@pytest.mark.parametrize("group", ["optimizer", "precision", "augment"])
def test_list_one_option(group: str, here: Callable[..., Done]) -> None:
    """Of one option when it helps, and every key with its value."""
    for option in GROUPS[group]:
        said, listed = good(here("list", f"{group}={option}")), group in catalog.LISTS
        begins = re.escape(f"{group}={f'[{option}]' if listed else option}: ")
        assert re.match(rf"{begins}\w+.*\n    when: \w+", said)
        for key in set(yaml.safe_load((ROOT / "conf" / group / f"{option}.yaml").read_text())) - {"_target_", "defaults"}:
            assert f"    {group}.{f'{option}.' if listed else ''}{key}: " in said


def test_list_a_key_of_no_group(here: Callable[..., Done]) -> None:
    keys = {key: value for key, value in root_config().items() if key != "defaults"}
    for key, value in keys.items():
        shown = good(here("list", key))
        assert shown.startswith(f"{key} is a key of the whole config, not a group: ")
        assert yaml.safe_load(shown.partition("not a group: ")[2].partition(", by default; ")[0]) == value
        assert len(shown.partition("by default; ")[2]) > 10, f"what {key} does"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("list", "nope"), ("'nope'", "optimizer")),
        (("list", "tarket"), ("'tarket'", "'target'")),
        (("list", "adamw"), ("'adamw'", "adamw is an option", "drivetrain list optimizer=adamw")),
        (("list", "order"), ("'order'", "order is a key of data", "drivetrain list data")),
        (("list", "optimizer=adamx"), ("is no option of optimizer", "'adamw'")),
        (("evaluate",), ("needs a run's directory",)),
        (("evaluate", "last"), ("last is the newest run below outputs/, and there is none",)),
        (("train", "resume=last"), ("last is the newest run below outputs/, and there is none",)),
        (("export", ".", "onnx", "pt2"), ("writes one format: onnx or torch.export",)),
        (("export", ".", "m.pt2", "--out", "m.onnx"), ("one file is written, but m.pt2 and m.onnx are named",)),
        (("list", "--outt"), ("--outt", "there is: --config-dir")),
        (("show", "--datax"), ("--datax: did you mean --data?",)),
        (("compare", "--rounds", "4", "--quality"), ("--rounds 4 is rounds=4", "--quality is quality=true")),
        (("tune", "--budget", "60"), ("--budget 60 is budget_s=60",)),
        (("train", "--dry-run"), ("--dry-run is debug=fast",)),
        (("train", "--aug-splits", "3"), ("--aug-splits is no setting here: ",)),
        (("train", "epochs", "=", "3"), ("no spaces", "say epochs=3")),
        (("list", "optimizer.lr"), ("'optimizer.lr'", "lr is a key of optimizer")),
        (("list", "optimiser"), ("'optimiser'", "'optimizer'")),
        (("trian",), ("'trian'", "'train'")),
        (("complet",), ("did you mean 'completion'",)),
        (("precision=amp",), ("drivetrain train precision=amp",)),
        (("recipe",), ("nothing is given", "list", "show", "check", "export", "verify", "diff")),
        (("recipe", "chek"), ("'chek'", "'check'")),
        (("recipe", "show"), ("one name", "naive")),
        (("recipe", "show", "nope"), ("recipe=nope", "naive")),
        (("recipe", "check"), ("name or path",)),
        (("recipe", "check", "nope"), ("nope", "naive")),
        (("recipe", "export", "."), ("no run",)),
        (("completion",), ("bash", "zsh", "fish")),
        (("completion", "csh"), ("bash", "zsh", "fish")),
        (("train", "--cfg", "job", "--package", "optimiser"), ("optimiser", "'optimizer'")),
        (("train", "--cfg", "job", "optimizer.lr=-1"), ("optimizer.lr=-1",)),
        (("train", "--cfg", "job", "-m", "epochs=1,2"), ("-m starts several: leave one of them out",)),
        (("list", "optimizer", "precision"), ("precision",)),
        (("recipe", "list", "naive"), ("naive",)),
        (("recipe", "verify"), ("name or path of a recipe",)),
        (("recipe", "verify", "precision=bf16"), ("name or path of a recipe",)),
        (("recipe", "diff", "naive"), ("wants two", "given 1")),
        (("recipe", "diff", "naiv", "fasst"), ("recipe=naiv ", "recipe=fasst ", "'fast'")),
        (("recipe", "diff", "naive", "fast", "recipe=default"), ("leave recipe= out",)),
        (("recipe", "diff", "naive", "."), ("no run's directory",)),
        (("recipe", "diff", "naive", "fast", "mesure=true"), ("'mesure'",)),
        (("bisect", "naive"), ("wants GOOD and BAD",)),
        (("bisect", "naive", "fast", "fast_gpu"), ("'fast_gpu': after GOOD and BAD come overrides",)),
        (("bisect", "naive", "naive"), ("naive and naive are the same config",)),
        (("bisect", "model=mlp", "model=mlp epochs=3"), ("differ only in epochs: a step is as fast with either",)),
        (("bisect", "model=mlp", "model=mlp runtime.seed=3"), ("differ only in runtime.seed: a step is as fast with either",)),
        (("bisect", "naive", "nosuch"), ("recipe=nosuch is not known",)),
        (("bisect", "naive", "outputs/nothing.yaml"), ("there is no such file",)),
        (("bisect", "data=digits", "data=wine"), ("different data: data=digits and data=wine",)),
        (("bisect", "precision=fp32", "precision=bf17"), ("did you mean",)),
        (("bisect", "precision=fp32", "precision=bf16 quick"), ("'quick' in 'precision=bf16 quick' is not of the form",)),
        (("bisect", "precision=fp32", "precision=bf16", "rounds=3"), ("rounds=3: fewer than 6 rounds give no interval",)),
        (("bisect", "precision=fp32", "precision=bf16", "seeds=2"), ("seeds=2: fewer than 4 seeds give no interval",)),
        (("bisect", "precision=fp32", "precision=bf16", "resume=auto"), ("leave resume= out",)),
        (("bisect", "naive", "."), ("is no run's directory",)),
        (("tune", "what=everything"), ("what=everything",)),
        (("tune", "budget_s=-1"), ("budget_s=-1",)),
        (("tune", "resume=auto"), ("leave resume= out",)),
        (("tune", "precision=bf17"), ("did you mean",)),
        (("tune", "target=fast"), ("give a metric and a value",)),
        (("tune", "target=accuracy>=0.9", "what=lr"), ("leave out what=",)),
        (("tune", "--target", "accuracy>=0.9", "what=lr"), ("target=accuracy>=0.9 searches the batch",)),
        (("tune", "--target=fast"), ("give a metric and a value",)),
        (("tune", "--target", "accuracy>=0.9", "target=accuracy>=0.8"), ("target",)),
        (("tune", "target=accuracy>=0.9", "batch=critical"), ("set batch=fixed",)),
        (("compare", "precision=fp32"), ("nothing to compare",)),
        (("compare", "precision=fp32,bf16", "rounds=0"), ("rounds=0: must be",)),
        (("compare", "precision=fp32,bf16", "rounds=6,12"), ("takes one value",)),
        (("compare", "precision=fp32,bf16", "rounds=6", "rounds=12"), ("rounds is given twice",)),
        (("compare", "precision=fp32,bf17", "optimizer.lrr=1"), ("did you mean 'bf16'", "did you mean 'lr'")),
        (("compare", "compile=none,cudagraph", "runtime.device=cpu"), ("compile=cudagraph needs a CUDA device",)),
        (("compare", "resume=auto", "precision=fp32,bf16"), ("leave resume= out",)),
        (("ablate", "resume=auto", "precision=fp32,bf16"), ("leave resume= out",)),
        (("doctor", "resume=auto", "precision=fp32,bf16"), ("leave resume= out",)),
        (("report", "nowhere"), ("no such folder",)),
        (("report", "."), ("no run in .",)),
        (("report", "target=high"), ("target=high",)),
        (("report", "tarGet=1"), ("no setting",)),
        (("doctor", "precision=bf17"), ("did you mean 'bf16'",)),
        (("ablate", "tables=[alone]", "--recipe", "mine.yaml"), ("tables= must have steps",)),
        (("doctor", "prove=false", "--recipe", "mine.yaml"), ("prove=false measures nothing",)),
        (("forecast", "device=H100", "model=no_such_model"), ("building the run", "no_such_model")),
        (("forecast", "--device", "h100", "model=no_such_model"), ("building the run", "no_such_model")),
        (("forecast", "device=4090", "model=no_such_model"), ("building the run", "no_such_model")),
        (("forecast", "device=h1000"), ("device=h1000: must be one of 'here', 'b200'",)),
        (("forecast", "device=1000"), ("device=1000: must be one of 'here', 'b200'",)),
        (("forecast", "--device=RTX"), ("device=rtx: must be one of 'here', 'b200'",)),
        (("train", "hydra/launcher=submitit_slurm"), ("'hydra/launcher=submitit_slurm'", "behind -m")),
        (("train", "optimizer.lr=interval(1,2)"), ("say -m hydra/sweeper=optuna before it, or give one value",)),
        (("train", "-m", "optimizer.lr=interval(1,2)"), ("or search by -m hydra/sweeper=optuna",)),
        (("train", "-m", "epochs=1,2", "hydra/launcher=submitit_slurm"), ("there is no sbatch and no srun here",)),
        (("train", "-m", "resume=there"), ("no jobs.json in it",)),
        (("train", "-m", "epochs=1,2", "hydra/sweeper=optuna", "optimizer.lrr=interval(1,2)"), ("did you mean 'lr'?",)),
        (("train", "-m", "precision=fp32,bf17", "hydra/sweeper=optuna"), ("did you mean 'bf16'?",)),
        (("train", "-m", "epochs=1", "hydra/sweeper=optuna"), ("has nothing to search",)),
    ],
)
def test_bad_verbs(words: tuple[str, ...], names: tuple[str, ...], tmp_path: Path, here: Callable[..., Done]) -> None:
    done = here(*words)
    assert done.code == 2, done
    assert not [name for name in names if name not in done.err], done.err
    assert len(done.err.splitlines()) <= len(names), done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


# Recipes.

CFG = ("train", "--cfg", "job")


def test_a_verb_of_a_plugin_is_held_to_its_contract() -> None:
    with pytest.raises(UserError, match="the verb mine is json:nothing, but json has no function 'nothing'"):
        Verb("mine", "json:nothing", "").run([])
    with pytest.raises(UserError, match=r"the verb mine returned '\[\]': json:dumps must return an exit code"):
        Verb("mine", "json:dumps", "").run([])


def test_recipe_list_and_show(tmp_path: Path, here: Callable[..., Done]) -> None:
    """All that ship, each with its line; each shown to the letter; the user's own beside them."""
    put(tmp_path / "recipes" / "mine.yaml", "description: my own words\nepochs: 3\n")
    said = good(here("recipe", "list"))
    shipped = {p.stem for p in (ROOT / "recipes").glob("*.yaml")}
    assert shipped >= {"naive", "default", "fast", "speed_ladder"}
    assert all(re.search(rf"^\s*{name}\s+\w+", said, re.M) for name in (*shipped, "mine"))
    assert "my own words" in said
    assert good(here("recipe", "show", "naive")) == (ROOT / "recipes" / "naive.yaml").read_text()
    assert yaml.safe_load(good(here(*CFG, "recipe=mine")))["epochs"] == 3


def test_recipe_check(tmp_path: Path, here: Callable[..., Done]) -> None:
    """Several at once: good ones are said to be good, and all the problems of the bad ones are told."""
    shipped = ["cifar10_fast", "digits_fast", "speed_ladder"]  # tests/test_zoo.py checks them all
    lines = good(here("recipe", "check", *shipped)).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [f"{name}: valid" for name in shipped]
    (tmp_path / "a.yaml").write_text("optimizer:\n  lrr: 3\n")
    (tmp_path / "b.yaml").write_text("epochs: 0\n")
    done = here("recipe", "check", "a.yaml", "naive", "b.yaml")
    assert done.code == 2
    assert done.out == "naive: valid\n"
    assert "a.yaml:2" in done.err
    assert "epochs=0" in done.err


def test_a_large_sweep_is_checked_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value once, beside the first of the others; a small sweep in all its combinations."""
    file, seen = tmp_path / "sweep.yaml", []
    monkeypatch.setattr(recipe, "compose", lambda words, dirs, base: base.values)
    nothing = SimpleNamespace(composed=SimpleNamespace(notices=[]), shared=None, run=SimpleNamespace(values={"trust": []}))
    monkeypatch.setattr(recipe, "checked", lambda values: seen.append(values) or nothing)
    file.write_text("sweep:\n  epochs: [1, 2, 3]\n  updates: [1, 2, 3, 4]\n")
    assert recipe.check(reader.read(file)) == []
    assert len(seen) == 12
    seen.clear()
    file.write_text("sweep:\n  epochs: [1, 2, 3, 4, 5, 6]\n  updates: [1, 2, 3, 4, 5, 6, 7]\n")
    assert recipe.check(reader.read(file)) == ["12 of its 42 combinations were checked"]
    assert {values["epochs"] for values in seen} == set(range(1, 7))
    assert {values["updates"] for values in seen} == set(range(1, 8))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run."""
    place = tmp_path_factory.mktemp("finished")
    train(*TINY, "optimizer=sgd", "updates=3", cwd=place, code=0)
    return only_run(place / "outputs")


def test_last_is_the_newest_run_and_out_is_where_a_verb_writes(
    finished: Path, tmp_path: Path, here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.parents[2])
    for number, words in enumerate((
        ("export", "last", "safetensors"), ("export", "last"), ("card", "last"), ("recipe", "export", "last"), ("report", "last"),
        ("evaluate", "last"), ("predict", "last", "--data", "test"), ("recipe", "schema"), ("show", "model=mlp"),
    )):  # fmt: skip
        suffix = ("", ".safetensors", ".md", ".yaml", "", ".json", ".csv", ".json", ".png")[number]
        out = tmp_path / f"{number}{suffix}"
        assert here(*words, "--out", str(out)).code == 0
        assert out.exists(), words
    refused = here("export", "last", "onxx")
    assert (refused.code, "did you mean 'onnx'" in refused.err) == (2, True)


def test_recipe_export(finished: Path, tmp_path: Path, here: Callable[..., Done]) -> None:
    """A run's recipe and, as comments, where it comes from: on the screen or in a file that is not overwritten; it replays."""
    shown = good(here("recipe", "export", str(finished)))
    said = [line for line in shown.partition("defaults:")[0].splitlines() if line.startswith("#")]
    recipe, _, rest = shown.partition("claim:\n")
    claim, mark, unchanged = rest.partition("\nunchanged:")
    assert recipe + mark + unchanged == "\n".join([*said, (finished / "recipe.yaml").read_text()])
    told = result(finished)
    assert f"mean: {told['metrics']['validation']['final']['accuracy']:.6g} " in claim
    device, rate = told["device_name"], f"{told['samples_per_second']:,.0f} samples/s"
    for fact in (
        finished.name,
        device,
        "torch 2.",
        "the run completed",
        f"{told['metrics']['validation']['best']['accuracy']:.4f}",
        rate,
    ):
        assert fact in "\n".join(said)
    assert "mine.yaml" in good(here("recipe", "export", str(finished), "mine.yaml"))
    assert (tmp_path / "mine.yaml").read_text() == shown
    assert prepare(["recipe=mine.yaml"]).config_hash == told["config_hash"]
    again = here("recipe", "export", str(finished), "mine.yaml")
    assert again.code == 2
    assert "mine.yaml is there already" in again.err
    assert good(here("recipe", "check", "mine.yaml")) == "mine.yaml: valid\n"


# The composed config.


def test_cfg_job(tmp_path: Path, here: Callable[..., Done]) -> None:
    """The whole config as YAML; with --resolve, without references; with --package, a part of it; nothing is run."""
    words = ("precision=amp", "recipe=fast", "epochs=7", "optimizer.lr=0.25", "optimizer.weight_decay=${optimizer.lr}")
    cfg = lambda *more: good(here(*CFG, *more))  # noqa: E731
    config = yaml.safe_load(cfg(*words))
    assert set(config) >= set(GROUPS) - {"augment", "surgery", "metrics"} | {"epochs", "updates", "output_dir"}, (
        "all but empty lists"
    )
    assert config["precision"]["_target_"].endswith(".Amp")
    assert (config["epochs"], config["optimizer"]["weight_decay"]) == (7, "${optimizer.lr}")
    resolved = yaml.safe_load(cfg(*words, "--resolve"))
    assert resolved["optimizer"]["weight_decay"] == resolved["optimizer"]["lr"] == 0.25
    assert yaml.safe_load(cfg(*words, "--package", "optimizer")) == config["optimizer"]
    assert yaml.safe_load(cfg(*words, "--package", "optimizer", "--resolve")) == resolved["optimizer"]
    assert cfg(*words, "-p", "optimizer.lr").split() == ["0.25"]
    assert not list(tmp_path.iterdir())


# Output.


def test_quiet_and_piped(tmp_path: Path) -> None:
    """-q: only the result, with the run's whole path to be copied. Without: the recipe and a line an evaluation."""
    place = tmp_path / ("x" * 120) / ("y" * 120)
    words = (*TINY, "optimizer=sgd", "epochs=2", f"output_dir={place}")
    quiet, done = good(train(*words, cwd=tmp_path)), run("train", *words, cwd=tmp_path)
    loud = done.out
    assert done.code == 0
    assert sum(str(path) in quiet for path in runs(place)) == 1
    assert re.fullmatch(r"samples: 1,150 training.*\n", done.err), "messages have a stream of their own"
    for said in (quiet, loud):
        assert re.search(r"status\s+completed", said)
        assert re.search(r"test accuracy\s+0\.\d+", said)
    assert "recipe default:" not in quiet
    assert "epoch" not in quiet.split("result")[0]
    assert "recipe default:" in loud
    assert "optimizer=sgd" in loud
    lines = [line for line in loud.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 2
    for text in ("update 8/16", "loss", "lr", "samples/s", "data wait", "GiB", "validation accuracy"):
        assert text in lines[0]


def test_a_terminal_is_not_assumed_from_the_environment(tmp_path: Path) -> None:
    """FORCE_COLOR and its like, as CI sets them, put no control characters into a file."""
    done = run("list", cwd=tmp_path, env={"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": "40"})
    assert good(done) == good(run("list", cwd=tmp_path))


@pytest.mark.slow
def test_output_in_a_narrow_alphabet(tmp_path: Path) -> None:
    """The lists and a run work also where standard output cannot write × or –."""
    plain = {"PYTHONIOENCODING": "ascii"}
    assert run("list", cwd=tmp_path, env=plain).code == 0
    run("train", *TINY, "updates=2", cwd=tmp_path, env=plain, code=0)
    assert result(only_run(tmp_path / "outputs"))["status"] == "completed"


@pytest.mark.slow
def test_standard_output_closed(tmp_path: Path) -> None:
    """A daemon's: no output at all."""
    command = [sys.executable, "-m", "drivetrain", "train", "-q", *TINY, "updates=1"]
    script = f"exec {' '.join(map(repr, command))} >&-"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert result(only_run(tmp_path / "outputs"))["status"] == "completed"


# Completion.

DRIVE = """
complete_line() {
    COMP_LINE="$1" COMP_POINT="${2:-${#1}}" COMP_WORDS=($1) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _drivetrain
    echo "${COMPREPLY[@]}"
}
"""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("drivetrain tr", {"train"}),
        ("drivetrain train pre", {"precision=", "precision."}),
        ("drivetrain train precision=a", {"amp"}),
        ("drivetrain train -m precision=fp32,b", {"fp32,bf16", "fp32,bf16_pure"} & {f"fp32,{o}" for o in GROUPS["precision"]}),
        ("drivetrain train precision=bf16 optimizer=s", {o for o in GROUPS["optimizer"] if o.startswith("s")}),
        ("drivetrain train recipe=fa", {"fast", "fast_gpu"}),
        ("drivetrain train epo", {"epochs="}),
        *((f"drivetrain {verb} epo", {"epochs="}) for verb in ("compare", "ablate", "tune", "doctor", "show")),
        ("drivetrain list opt", {"optimizer"}),
        ("drivetrain recipe sh", {"show"}),
        ("drivetrain recipe show na", {"naive"}),
        ("drivetrain recipe diff naive fa", {"fast", "fast_gpu"}),
        ("drivetrain recipe verify fast precision=a", {"amp"}),
        ("drivetrain completion ", {"bash", "zsh", "fish"}),
        ("drivetrain train nothing-like-it", set()),
        ("drivetrain train optimizer.lr_d", {"optimizer.lr_decay="}),
        ("drivetrain train -cd nowhere optimizer.lr_d", {"optimizer.lr_decay="}),
        ("drivetrain train -m hydra/sweeper=", {"basic", "optuna"}),
        ("drivetrain train -m hydra.launcher.part", {"hydra.launcher.partition="}),
        ("drivetrain bisect na", {"naive"}),
        ("drivetrain bisect naive fast precision=bf16_", {"bf16_pure"}),
        ("drivetrain bisect naive precision=bf16_", {"bf16_pure"}),
        ("drivetrain certify precision=bf16 ag", {"against"}),
        ("drivetrain certify precision=bf16 against ag", set()),
        ("drivetrain certify precision=bf16 against precision=fp3", {"fp32"}),
        ("drivetrain forecast device=h10", {"h100", "h100-pcie"}),
        ("drivetrain forecast prec", {"precision=", "precision."}),
    ],
)
def test_completion(line: str, offered: set[str]) -> None:
    """Bash shows what stands after the "="."""
    assert {candidate.partition("=")[2] or candidate for candidate in completion.candidates([line])} == offered


def test_completion_in_bash(tmp_path: Path, here: Callable[..., Done]) -> None:
    """After the last "=", and in the middle of a line: the function is driven as readline drives it."""
    (program := empty(tmp_path / "bin") / "drivetrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m drivetrain "$@"\n')
    program.chmod(0o755)
    lines = "complete_line 'drivetrain train precision=a'\ncomplete_line 'drivetrain train pre optimizer=sgd' 20\n"
    script, env = good(here("completion", "bash")) + DRIVE + lines, environment()
    env["PATH"] = f"{program.parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("amp\nprecision= precision.\n", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str, here: Callable[..., Done]) -> None:
    """A script that calls `drivetrain complete`; where the shell is installed, one that it can read."""
    script = good(here("completion", shell))
    assert "drivetrain complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=script, text=True, check=True)


# An own config dir, and an own class.


def own_option(place: Path, text: str, group: str = "model", name: str = "mynet") -> Path:
    """A directory with my_nets.py and conf/<group>/<name>.yaml."""
    with_own_nets(place)
    file = place / "conf" / group / f"{name}.yaml"
    put(file, text)
    return place


OWN_OPTION = "# my own network\n_target_: drivetrain.model.own.OwnModel\ntarget: my_nets.Net\nkwargs: {}\n"


def test_own_option_that_names_an_own_class(tmp_path: Path) -> None:
    place = own_option(tmp_path / "here", OWN_OPTION)
    words = ("--config-dir", "conf", "model=mynet", "log_every=1", "epochs=1")
    refused = train(*words, cwd=place, code=2)
    assert "my_nets.Net" in refused.err
    assert "trust=[my_nets]" in refused.err
    assert not (place / "outputs").exists()
    train(*words, "trust=[my_nets]", cwd=place, code=0)
    assert result(only_run(place / "outputs"))["updates"] == 8
    train(*OWN, "model.target=my_nets.Net", "epochs=1", "output_dir=direct", cwd=place, code=0)
    assert weights(only_run(place / "direct")) == weights(only_run(place / "outputs")), "the same network"


WRONG = {  # what is wrong: its group, its text, what the answer must name
    "no such group": ("models", OWN_OPTION, ("models",)),
    "no YAML": ("model", "_target_: [1\n", ("mynet.yaml",)),
    "no mapping": ("model", "- a\n- b\n", ("mynet.yaml",)),
    "no target": ("model", "width: 3\n", ("_target_",)),
    "a network, not an option": ("model", "_target_: my_nets.Net\n", ("my_nets.Net", "model=own")),
    "another group's": ("model", "_target_: drivetrain.data.digits.Digits\n", ("drivetrain.data.digits.Digits", "model")),
}


@pytest.mark.parametrize("case", WRONG)
def test_own_option_that_is_wrong(case: str, tmp_path: Path) -> None:
    group, text, names = WRONG[case]
    place = own_option(tmp_path / "here", text, group)
    done = train("--config-dir", "conf", "model=mynet", "trust=[my_nets]", "updates=1", cwd=place, code=2)
    assert not [n for n in names if n not in done.err], done.err
    assert not (place / "outputs").exists()


# Not installed: a bare copy of the checkout.


def bare_checkout(place: Path) -> Path:
    """A copy as `git clone` gives it, where nothing called drivetrain is installed; it need not be compiled anew."""
    for name in ("src", "conf", "recipes"):
        shutil.copytree(ROOT / name, place / name)
    return place


@pytest.mark.parametrize("words", [(), pytest.param(("parallel=ddp",), marks=pytest.mark.slow)], ids=["alone", "ranks"])
def test_from_a_bare_checkout(tmp_path: Path, words: tuple[str, ...]) -> None:
    """The copy's own code, conf/ and recipes/ are used, in its ranks too, whatever is installed beside them."""
    place = bare_checkout(tmp_path / "clone")
    conf = place / "conf" / "model" / "mlp.yaml"
    conf.write_text(conf.read_text().replace("[256, 256]", "[24]"))
    (place / "recipes" / "only_here.yaml").write_text("description: of this copy\nepochs: 1\n")
    model = place / "src" / "drivetrain" / "model" / "nets.py"
    model.write_text(model.read_text() + "\nprint('the code of', __file__)\n")
    env = {"PYTHONPATH": ""}
    done = run("-q", "model=mlp", "recipe=only_here", *words, cwd=place, how=SRC_TRAIN, env=env, code=0)
    assert f"the code of {model}" in done.out
    run_dir = only_run(place / "outputs")
    left = strict_json((run_dir / "result.json").read_text())
    assert (left["status"], left["epochs"], left["world_size"]) == ("completed", 1.0, 1 + len(words))
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["model"]["hidden"] == [24]


def test_environment_of_a_run_names_the_command(finished: Path) -> None:
    about = json.loads((finished / "environment.json").read_text())
    assert about["command"][1:] == ["train", "-q", *about["overrides"]]
