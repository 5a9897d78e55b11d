"""Interpreters that drivetrain starts do not import from the working directory."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain
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


def test_the_processor_time_of_children_counts():
    """Of one that is alive: once it has ended, its parent no longer sees it."""
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True); input()"
    before = process.processor_seconds()
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "done\n"
        assert process.processor_seconds() - before > 0.25
        child.communicate("\n")


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


# --- every text file is UTF-8, whatever the locale: an ASCII locale would end a run at the first ü of a class's name ---

PACKAGE = Path(drivetrain.__file__).parent
METHODS = {"read_text", "write_text"}
OWN = {"files"}  # core.files: its functions are UTF-8 themselves


def without_encoding(source: str) -> list[int]:
    """The lines that open, read or write text without saying its encoding."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(k.arg in ("encoding", None) for k in node.keywords):
            continue
        function, of = node.func, None
        if isinstance(function, ast.Attribute):
            of = function.value.id if isinstance(function.value, ast.Name) else None
            name = function.attr
        else:
            name = getattr(function, "id", "")
        if of in OWN or (of is None and name in METHODS and isinstance(function, ast.Name)):
            continue
        if name in METHODS:
            most = 0 if name == "read_text" else 1
            found += [node.lineno] if len(node.args) <= most else []
        elif name == "open" and of not in ("os", "Image", "tarfile", "webbrowser", "fsspec", "gzip", "wave"):
            at = 0 if isinstance(function, ast.Attribute) else 1
            mode = next((k.value for k in node.keywords if k.arg == "mode"), node.args[at] if len(node.args) > at else None)
            is_text = mode is None or (isinstance(mode, ast.Constant) and isinstance(mode.value, str) and "b" not in mode.value)
            found += [node.lineno] if is_text else []
    return found


def test_a_missing_encoding_is_found():
    bad = [
        "open(p)",
        "open(p, 'w')",
        "p.open()",
        "p.open('a', newline='')",
        "p.read_text()",
        "p.write_text(t)",
        "open(p, mode='r')",
    ]
    assert [line for line in bad if not without_encoding(line)] == []
    good = [
        "open(p, 'rb')",
        "p.open('ab')",
        "open(p, encoding='utf-8')",
        "p.read_text('utf-8')",
        "files.read_text(p)",
        "os.open(p, 0)",
    ]
    assert [line for line in good if without_encoding(line)] == []


def test_every_text_file_is_utf_8():
    modules = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {name: lines for name, text in modules.items() if (lines := without_encoding(text))}
    assert found == {}, "give encoding='utf-8', or use core.files"
