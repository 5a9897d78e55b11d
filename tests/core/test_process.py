"""Interpreters that drivetrain starts do not import from the working directory."""

import subprocess
import sys

from drivetrain.core import process
from drivetrain.core.paths import remove_working_directory


def test_a_module_of_the_working_directory_is_not_imported(tmp_path, monkeypatch):
    """A stranger's folder may have a json.py in it."""
    (tmp_path / "json.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert "" not in process.import_path().split(":")
    path = {"PYTHONPATH": process.import_path()}
    command = process.command("json.tool")
    done = subprocess.run([*command, "--help"], cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert (done.returncode, "usage" in done.stdout) == (0, True), done
    command.remove("-P")
    assert "imported" in subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, check=False).stderr


def test_nor_by_the_interpreters_that_libraries_start(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('imported')\n")
    remove_working_directory()
    assert sys.path[0] != str(tmp_path)
    subprocess.run([sys.executable, "-c", "import json"], check=True)
