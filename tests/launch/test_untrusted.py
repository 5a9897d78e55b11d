"""The directory of a run may come from anybody: nothing in it decides what is trusted, imported or opened."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from drivetrain.measure.claims import diff
from drivetrain.run import reader
from tests.support.put import put
from tests.support.refusals import problems_of

EVIL = "raise SystemExit('imported')\n"


@pytest.fixture
def recorded(tiny, tmp_path) -> Path:
    """The files of a run that this user has recorded."""
    folder = tmp_path / "run"
    folder.mkdir()
    prepare(tiny("runtime.device=cpu", "output_dir=elsewhere")).write_files(folder)
    return folder


def change(recorded: Path, **content: object) -> None:
    file = recorded / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **content}))


def settings(recorded: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((recorded / "environment.json").read_text())["machine_local"]
    return found


def problem(*words: str) -> str:
    return " ".join(problems_of(prepare, words))


def test_an_own_run_needs_no_word(recorded):
    assert prepare([f"resume={recorded}"]).run.values["output_dir"] == "elsewhere"


def test_a_changed_record_is_not_taken(recorded, tmp_path):
    """Its settings are asked for by name; nothing of the package is imported."""
    (tmp_path / "evil.py").write_text(EVIL)
    change(recorded, machine_local={**settings(recorded), "trust": ["evil"], "model.target": "evil.Net", "model": "own"})
    says = problem(f"resume={recorded}")
    assert "was recorded by another user or machine, or has been changed" in says
    assert all(word in says for word in ("trust=", "model.target=", "evil.Net", "output_dir="))
    assert "evil" not in sys.modules


def test_folders_with_options_are_not_taken(recorded, tmp_path):
    """They would go on the import path, and their options' modules would be imported."""
    conf = tmp_path / "theirs" / "conf" / "clip"
    put(conf / "mine.yaml", "_target_: evil.Clip\n")
    change(recorded, config_dirs=[str(conf.parent)])
    assert f"--config-dir {conf.parent}" in problem(f"resume={recorded}", "output_dir=here")
    assert str(conf.parents[1]) not in sys.path


def test_a_run_of_another_user_goes_on_by_the_words_that_one_agrees_with(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    assert "elsewhere" in problem(f"resume={recorded}")
    assert prepare([f"resume={recorded}", "output_dir=here", "runtime.device=cpu"]).run.values["output_dir"] == "here"


def test_a_record_cannot_steer_the_terminal(recorded):
    change(recorded, machine_local={"data.root": "\x1b[2Jgone"})
    assert "\x1b" not in problem(f"resume={recorded}")


def test_the_environment_is_not_read_for_a_stranger(recorded, monkeypatch):
    """A reference in config.yaml would be resolved and shown as a difference."""
    monkeypatch.setenv("API_KEY_OF_MINE", "hunter2")
    config = yaml.safe_load((recorded / "config.yaml").read_text())
    config["optimizer"]["lr"] = "${oc.env:API_KEY_OF_MINE}"
    (recorded / "config.yaml").write_text(yaml.safe_dump(config))
    says = problem(f"resume={recorded}")
    assert "optimizer.lr" in says
    assert "hunter2" not in says


DAMAGED = {
    "environment.json": [
        *({"machine_local": value} for value in ([1], "a")), *({"config_dirs": value} for value in (5, "/etc", [{}])),
    ],
    "config.yaml": ['a: "${a"\n', "[]\n", "? [a]\n: 1\n", "a: [" + "1," * 60_000 + "1]\n"],
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_of_wrong_types_or_no_config_is_damaged(recorded, name):
    file = recorded / name
    whole = file.read_text()
    for content in DAMAGED[name]:
        file.write_text(content if isinstance(content, str) else json.dumps({**json.loads(whole), **content}))
        with pytest.raises(UserError, match=rf"its {name} is damaged"):
            prepare([f"resume={recorded}"])
        reader.read(recorded)


def test_the_recipe_of_a_run_is_not_a_link(recorded, tmp_path):
    """Messages would quote the file that it leads to."""
    (recorded / "recipe.yaml").rename(tmp_path / "elsewhere.yaml")
    (recorded / "recipe.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    for read in (lambda: prepare([f"resume={recorded}"]), lambda: diff.command([str(recorded), "fast"])):
        with pytest.raises(UserError, match="it is a link"):
            read()
