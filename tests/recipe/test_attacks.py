"""Recipes and runs' folders that were made to be read as something else than they look, or to be followed elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from drivetrain.cli.recipe import check as checked_recipe
from drivetrain.config import validate as check
from drivetrain.config.compose import compose
from drivetrain.config.keys import KeySetter
from drivetrain.core import files
from drivetrain.core.errors import UserError
from drivetrain.launch.job import checked, prepare
from drivetrain.recipe import reader as recipes
from drivetrain.recipe.reader import Recipe
from drivetrain.run import environment, reader, recipe_file, records


def recipe(text: str) -> Recipe:
    return recipes.read(Path("mine.yaml"), text.encode())


def exported(given: Recipe) -> str:
    """The text that a run with this recipe writes."""
    job = checked(compose([], base=given))
    return recipe_file.to_recipe(job.composed, job.machine_local_keys, check.identifying_keys(job.run))


# --- recipes ---


@pytest.mark.parametrize("text", ["010", "0x1f", "0b11", "1:30", "+0_7", "1:30.5", "00.5"])
def test_a_number_that_yaml_reads_otherwise_than_a_person_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"mine.yaml:1: epochs: YAML reads {text} as ")):
        recipe(f"epochs: {text}\n")
    assert recipe("description: 'at 1:30'\noptimizer: {lr: 0.05, weight_decay: -0.0}\nepochs: 10\n").values["epochs"] == 10


def test_a_key_that_is_a_list_is_refused() -> None:
    with pytest.raises(UserError, match="is not a key"):
        recipe("? [a, b]\n: 1\n")
    with pytest.raises(UserError, match=r"mine\.yaml:1: unchanged: must be"):
        recipe("unchanged: [1]\n")


@pytest.mark.parametrize("character", ["\r", "\x85", "\u2028", "\u2029", "\u202e", "\ufeff"])
def test_a_comment_hides_no_line(character: str) -> None:
    """YAML ends a comment at line breaks that editors do not show as such."""
    with pytest.raises(UserError, match=rf"mine\.yaml:2: a recipe may not have the character U\+{ord(character):04X}"):
        recipe(f"description: x\n# fast{character}epochs: 3\n")
    assert recipe("\ufeffepochs: 3\r\n# a\u00a0b\r\n").values == {"epochs": 3}


def test_a_message_has_no_line_of_the_files() -> None:
    for text in ('"a\\nerror: b": 1\n"a\\nerror: b": 2\n', "epochs: !%0Aerror 3\n"):
        with pytest.raises(UserError) as refused:
            recipe(text)
        assert all("\n" not in problem for problem in refused.value.problems)


def test_a_description_survives_a_run() -> None:
    """A run's recipe must be readable, else the run cannot be resumed."""
    described = recipe('description: "fast \N{ROCKET} \\"é\\"\\nand small"\n')
    assert recipe(exported(described)).description == described.description


def test_the_hash_is_of_what_left_out_names_too_where_the_file_sets_it() -> None:
    text = exported(recipe("")).replace("\nunchanged:", "\nleft_out: [optimizer]\n\nunchanged:", 1)
    without = recipe(text).only_chosen()
    settings = compose([], base=without)
    digest = recipe_file.digest(recipe_file.settable(settings, recipe_file.keys_of_machine(settings.plain) or (), ["optimizer"]))
    text = text.replace(str(recipe(text).header.hash), digest)
    assert any("was" in line or "were" in line for line in recipe_file.notices(recipe(text)))


def test_an_empty_mapping_takes_the_place_of_a_default_that_is_not() -> None:
    """So a recipe that spells out `lr_multipliers: {}` stays what it was when the default becomes another."""
    config = OmegaConf.create({"optimizer": {"lr_multipliers": {"head": 10}, "lr": 1}})
    setter = KeySetter(config, {})
    assert setter.set("optimizer.lr_multipliers", {}) is None
    assert config == {"optimizer": {"lr_multipliers": {}, "lr": 1}}


# --- places ---


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


# --- runs' folders ---


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    prepare([]).write_files(folder)
    return folder


@pytest.mark.parametrize(
    "changed",
    [{"machine_local": [1]}, {"machine_local": "a"}, {"config_dirs": 5}, {"config_dirs": "/etc"}, {"config_dirs": [{}]}],
    ids=str,
)
def test_a_record_of_wrong_types_is_damaged(run_dir: Path, changed: dict[str, object]) -> None:
    recorded = json.loads((run_dir / "environment.json").read_text())
    (run_dir / "environment.json").write_text(json.dumps({**recorded, **changed}))
    with pytest.raises(UserError, match=r"its environment\.json is damaged"):
        prepare([f"resume={run_dir}"])


@pytest.mark.parametrize("text", ['a: "${a"\n', "[]\n", "? [a]\n: 1\n", "a: [" + "1," * 60_000 + "1]\n"], ids=range(4))
def test_a_config_that_is_none_is_damaged(run_dir: Path, text: str) -> None:
    (run_dir / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"its config\.yaml is damaged"):
        prepare([f"resume={run_dir}"])
    reader.read(run_dir)


def test_folders_are_searched_to_a_depth(tmp_path: Path, run_dir: Path) -> None:
    """A stranger's folder may have a thousand in each other, more than Python can call."""
    for depth in (reader.DEEPEST, reader.DEEPEST + 1):
        below = tmp_path.joinpath("deep", *"a" * depth)
        below.mkdir(parents=True, exist_ok=True)
        (below / f"{depth}").mkdir()
        (below / f"{depth}/result.json").touch()
    with pytest.raises(UserError, match="no run in"):
        reader.find([tmp_path / "deep"])
    (tmp_path / "deep/a/run").mkdir()
    (tmp_path / "deep/a/run/result.json").touch()
    assert [run.path.name for run in reader.find([tmp_path / "deep", run_dir])] == ["run", "run"]


def test_json_of_very_many_lists_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("[" + "[]," * 99 + "[]]")
    assert len(files.read_json(tmp_path / "a.json")) == 100
    monkeypatch.setattr(files, "MOST_JSON", 100)
    with pytest.raises(ValueError, match="too many lists"):
        files.read_json(tmp_path / "a.json")


def test_a_log_of_empty_lines_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_SPOILT", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"update": 1}\n' + b"\n" * 1000 + b'{"update": 2}\n')
    assert records.read(path).records == [{"update": 1}]


def test_no_picture_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").symlink_to(tmp_path / "precious")
    files.place_for(tmp_path / "images/a.png").write_bytes(b"png")
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / "linked").symlink_to(tmp_path / "images")
    with pytest.raises(OSError, match="link"):
        files.place_for(tmp_path / "linked/a.png")


def git(*words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True, capture_output=True)


def test_a_strangers_repository_runs_nothing(tmp_path: Path) -> None:
    """A run records the commit of the working directory, whose config can name programs for changed files."""
    git("init", "-q", ".")
    Path("a.txt").write_text("a\n")
    Path(".gitattributes").write_text("* filter=x=y\n")
    git("add", "a.txt", ".gitattributes")
    git("commit", "-qm", "a")
    commit = environment._git_commit()
    assert commit is not None
    assert len(commit) == 40
    for key in ("clean", "process", "smudge"):
        git("config", f"filter.x=y.{key}", "touch ran; cat")
    git("config", "filter.x=y.required", "true")
    git("config", "core.fsmonitor", "touch ran")
    os.utime("a.txt", (1, 1))  # so that git compares what is in it
    assert environment._git_commit() == commit
    Path("a.txt").write_text("b\n")
    assert environment._git_commit() == f"{commit}-dirty"
    assert not Path("ran").exists()


def test_a_check_of_a_whole_recipe_says_nothing_more() -> None:
    assert checked_recipe(recipe(exported(recipe("")))) == []
