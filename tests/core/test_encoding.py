"""Every text file is UTF-8, whatever the locale: an ASCII locale would end a run at the first ü of a class's name."""

from __future__ import annotations

import ast
from pathlib import Path

import drivetrain

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
