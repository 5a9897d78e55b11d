"""Only ordinary files are opened, within limits, and what stands in their place is never written through; text is UTF-8."""

import ast
import errno
import os
import re
from pathlib import Path

import pytest

import drivetrain
from drivetrain.core.machine import files


def test_a_link_is_not_followed_and_a_write_replaces_it(tmp_path):
    (tmp_path / "own").write_text("kept")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    for attempt in (lambda: files.read_text(link), lambda: files.opened(link, "a"), lambda: files.opened(link, "w")):
        with pytest.raises(OSError, match="it is a link"):
            attempt()
    files.write_text(link, "new")
    assert ((tmp_path / "own").read_text(), link.read_text(), link.is_symlink()) == ("kept", "new", False)


def test_a_fifo_holds_up_nobody(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for mode in ("rb", "ab"):
        with pytest.raises(OSError, match="it is no ordinary file"):
            files.opened(tmp_path / "fifo", mode)


def test_a_file_is_read_up_to_its_limit_and_no_further(tmp_path):
    (tmp_path / "a").write_bytes(bytes(11))
    assert len(files.read_bytes(tmp_path / "a", 11)) == 11
    with pytest.raises(OSError, match="larger than") as error:
        files.read_bytes(tmp_path / "a", 10)
    assert error.value.errno == errno.EFBIG


def test_json_of_very_many_lists_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("[" + "[]," * 99 + "[]]")
    assert len(files.read_json(tmp_path / "a.json")) == 100
    monkeypatch.setattr(files, "MOST_JSON", 100)
    with pytest.raises(ValueError, match="too many lists"):
        files.read_json(tmp_path / "a.json")


def test_no_picture_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").symlink_to(tmp_path / "precious")
    files.place_for(tmp_path / "images/a.png").write_bytes(b"png")
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / "linked").symlink_to(tmp_path / "images")
    with pytest.raises(OSError, match="link"):
        files.place_for(tmp_path / "linked/a.png")


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
    may = {name: text for name, text in modules.items() if re.search(r"open\(|_text\(", text)}  # the others need not be parsed
    found = {name: lines for name, text in may.items() if (lines := without_encoding(text))}
    assert found == {}, "give encoding='utf-8', or use core.files"
