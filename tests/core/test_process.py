"""Interpreters that drivetrain starts do not import from the working directory."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("module", ["drivetrain", "src.train"])
def test_no_module_of_the_standard_library_is_taken_from_there(tmp_path, module):
    """Neither by the package's own first imports, which come before any line of the command."""
    bare = [sys.executable, "-S"]  # without the modules that .pth files of installed packages import at the start
    pythons_own = subprocess.run(
        [*bare, "-c", "import runpy, sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    for name in sys.stdlib_module_names - set(pythons_own.stdout.split()):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the working directory')\n")
    (tmp_path / "src").symlink_to(process.PACKAGE.parent)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | {"PYTHONPATH": process.import_path()}
    words = [module, "--cfg", "job"] if module == "src.train" else [module, "--version"]
    done = subprocess.run([*bare, "-m", *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
