"""The directory of a run or a sweep may come from anybody: nothing in it decides what is trusted, imported or opened."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from drivetrain.core import user_state
from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from drivetrain.sweeps import driver, store

EVIL = "raise SystemExit('imported')\n"


@pytest.fixture
def run_dir(tiny, tmp_path) -> Path:
    """The files of a run that this user has recorded."""
    folder = tmp_path / "run"
    folder.mkdir()
    prepare(tiny("runtime.device=cpu", "output_dir=elsewhere")).write_files(folder)
    return folder


def change(run_dir: Path, **content: object) -> None:
    file = run_dir / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **content}))


def settings(run_dir: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run_dir / "environment.json").read_text())["machine_local"]
    return found


def problem(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        prepare(words)
    return " ".join(caught.value.problems)


def test_an_own_run_needs_no_word(run_dir):
    values = prepare([f"resume={run_dir}"]).run.values
    assert values["output_dir"] == "elsewhere"


def test_a_changed_record_is_not_taken(run_dir, tmp_path):
    """Its settings are asked for by name; nothing of the package is imported."""
    (tmp_path / "evil.py").write_text(EVIL)
    change(run_dir, machine_local={**settings(run_dir), "trust": ["evil"], "model.target": "evil.Net", "model": "own"})
    says = problem(f"resume={run_dir}")
    assert "was recorded by another user or machine, or has been changed" in says
    assert all(word in says for word in ("trust=", "model.target=", "evil.Net", "output_dir="))
    assert "evil" not in sys.modules


def test_folders_with_options_are_not_taken(run_dir, tmp_path):
    """They would go on the import path, and their options' modules would be imported."""
    conf = tmp_path / "theirs" / "conf" / "clip"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("_target_: evil.Clip\n")
    change(run_dir, config_dirs=[str(conf.parent)])
    assert f"--config-dir {conf.parent}" in problem(f"resume={run_dir}", "output_dir=here")
    assert str(conf.parents[1]) not in sys.path


def test_a_run_of_another_user_goes_on_by_the_words_that_one_agrees_with(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    assert "elsewhere" in problem(f"resume={run_dir}")
    assert prepare([f"resume={run_dir}", "output_dir=here", "runtime.device=cpu"]).run.values["output_dir"] == "here"


def test_a_record_cannot_steer_the_terminal(run_dir):
    change(run_dir, machine_local={"data.root": "\x1b[2Jgone"})
    assert "\x1b" not in problem(f"resume={run_dir}")


def test_the_environment_is_not_read_for_a_stranger(run_dir, monkeypatch):
    """A reference in config.yaml would be resolved and shown as a difference."""
    monkeypatch.setenv("API_KEY_OF_MINE", "hunter2")
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["optimizer"]["lr"] = "${oc.env:API_KEY_OF_MINE}"
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    says = problem(f"resume={run_dir}")
    assert "optimizer.lr" in says
    assert "hunter2" not in says


def test_a_changed_sweep_is_not_taken(tiny, tmp_path):
    """Its words may name code to run."""
    (tmp_path / "evil.py").write_text(EVIL)
    folder = tmp_path / "sweep"
    folder.mkdir()
    store.Sweep(folder, tiny("seed=1,2"), []).add([])
    assert store.read_own(folder)["jobs"] == []
    content = store.read(folder)
    content["overrides"] += ["trust=[evil]", "model=own", "model.target=evil.Net"]
    (folder / "jobs.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"start it anew with the words that you agree with: .*evil\.Net"):
        driver.run([f"resume={folder}"])
    assert "evil" not in sys.modules


def test_the_key_is_one_and_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = user_state.sign({"a": [1]})
    assert user_state.sign({"a": [1]}) == first != user_state.sign({"a": [2]})
    assert user_state.is_own({"a": [1]}, first)
    assert not user_state.is_own({"a": [2]}, first)
    assert not any(user_state.is_own({"a": [1]}, other) for other in (None, f"é{first}", "\udc80", 5))
    assert user_state.key_file().stat().st_mode & 0o777 == 0o600
    assert os.listdir(user_state.key_file().parent) == ["key"]


def test_a_home_that_cannot_be_written_signs_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert user_state.sign({}) is None
    assert not user_state.is_own({}, "0" * 64)
