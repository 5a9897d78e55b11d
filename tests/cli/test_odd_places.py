"""A run is the same wherever it is made and however Python was started: odd names, hash seeds, -O, a decimal comma."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from tests.support import command, slow
from tests.support.command import result, weights
from tests.support.refusals import problems_of

NAMES = (
    "a=b,c", "new\nline", "ünï ☃", "it's", '"', "[1,2]", "{x}", "${y}", "${oc.env:HOME}", "#", "per%cent", "~tilde", "*?", "a:b",
    "-dash", "tab\there", " ends ", "a;b|c&d", "back\\slash",
)  # fmt: skip
WORDS = ("data=digits", "model=mlp", "model.hidden=[8]", "runtime.threads=1", "updates=2", "saving.every_updates=2")
STARTS = {  # environment, and flags of the interpreter
    "hash seed 0": ({"PYTHONHASHSEED": "0"}, ()),
    "hash seed 7": ({"PYTHONHASHSEED": "7"}, ()),
    "-O": ({}, ("-O",)),
    "-OO": ({}, ("-OO",)),
    "a decimal comma": ({"LC_ALL": "de_DE.UTF-8"}, ()),
}
GERMAN = "import locale\nlocale.setlocale(locale.LC_ALL, 'de_DE.UTF-8')\nfrom drivetrain import Callback as Own\n"


def _end(run_dir: Path) -> tuple[str, bytes]:
    return result(run_dir)["config_hash"], weights(run_dir)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """A run at a place with a plain name."""
    place = tmp_path_factory.mktemp("plain")
    assert main.main(["train", "-q", *WORDS, f"output_dir={place}"]) == 0
    return _end(command.only_run(place))


@pytest.mark.parametrize("name", slow.but(NAMES[:2].__contains__, NAMES, repr))
def test_every_verb_works_in_a_folder_of_an_odd_name(name, plain, tmp_path, monkeypatch):
    place = command.empty(tmp_path / name)
    monkeypatch.chdir(place)
    assert main.main(["train", "-q", *WORDS]) == 0
    run_dir = command.only_run(place)
    assert _end(run_dir) == plain
    for words in (
        ("predict", str(run_dir), "--data", "test", "--out", str(place / "out.csv")),
        ("export", str(run_dir), str(place / "out.safetensors")),
        ("recipe", "export", str(run_dir), str(place / "r.yaml")),
        ("report", str(run_dir)),
        ("train", "-q", f"resume={run_dir}", "updates=3"),
        ("train", "-q", "recipe=r.yaml"),
    ):
        assert main.main([*words]) == 0, words
    (again,) = {*command.runs(place)} - {run_dir}
    assert _end(again) == plain
    assert sorted(each.name for each in place.iterdir()) == ["out.csv", "out.safetensors", "outputs", "r.yaml"]


def test_a_path_with_a_sign_of_the_grammar_is_shown_in_its_quotes(tmp_path):
    for name in ("[1,2]", "it's", "#", "a=b", "{x}", "new\nline"):
        (problem,) = problems_of(prepare, [f"output_dir=/tmp/{name}/runs"])
        word = subprocess.run(["sh", "-c", f"printf %s {problem.split(', as ')[1]}"], capture_output=True, text=True, check=True)
        assert prepare([word.stdout]).composed.plain["output_dir"] == f"/tmp/{name}/runs"


def test_bytes_that_are_no_utf_8_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is no UTF-8"):
        prepare(["output_dir=/tmp/\udce4"])
    monkeypatch.chdir(command.empty(tmp_path / "\udce4"))
    with pytest.raises(UserError, match="is no UTF-8"):
        prepare(["model=mlp"])


def test_a_working_directory_that_was_removed_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(command.empty(tmp_path / "gone"))
    os.rmdir(tmp_path / "gone")
    assert main.main(["train", *WORDS]) == 2
    assert capsys.readouterr().err == "error: the working directory no longer exists: change to another one\n"


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.parametrize("start", STARTS)
def test_however_python_was_started(start, plain, tmp_path):
    (env, flags), words = STARTS[start], WORDS
    if "LC_ALL" in env:
        made = shutil.which("localedef") and subprocess.run(
            ["localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"], check=False
        )
        if not made or made.returncode:
            pytest.skip("there is no German locale to be made")
        env, words = {**env, "LOCPATH": str(tmp_path)}, (*WORDS, "trust=[german]", "callbacks=[german.Own]")
        (tmp_path / "german.py").write_text(GERMAN)
    command.train(*words, cwd=tmp_path, how=(*flags, *command.DRIVETRAIN), env=env, code=0)
    found = _end(command.only_run(tmp_path))
    assert found[1] == plain[1]
    assert found[0] == plain[0] or "LC_ALL" in env
