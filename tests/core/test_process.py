"""Interpreters that drivetrain starts do not import from the working directory; the processor time of children counts."""

import colorsys
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.core.machine import process
from drivetrain.core.machine.paths import remove_working_directory
from tests.support.command import run


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


def test_the_processor_time_of_children_counts():
    """Of one that is alive: once it has ended, its parent no longer sees it."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); input()"
    before = process.processor_seconds()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "done\n"
        assert process.processor_seconds() - before > 0.25
        child.communicate("\n")
