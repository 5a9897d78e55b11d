"""Functions of the user's get what their parameters name."""

import ast
import errno
import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.machine import files, home, process
from drivetrain.core.machine.home import keep_first, measured_once
from drivetrain.core.machine.paths import remove_working_directory
from drivetrain.core.step.model_call import ModelCall
from drivetrain.core.user.call import UserCall
from tests.support.put import put

OFFERED = {"output": 1, "target": 2, "input": 3, "batch": 4, "model": 5, "progress": 6}


def made(function, **kwargs):
    return UserCall("loss.target=f", function, kwargs, offers=OFFERED)


class Module(torch.nn.Module):
    """Its forward has the names."""

    def forward(self, x, output):
        return [x, output]


@pytest.mark.parametrize(
    ("function", "gets", "needs"),
    [
        (lambda a, b: [a, b], [1, 2], {"output", "target"}),
        (lambda input, target: [input, target], [1, 2], {"output", "target"}),  # as torch's own losses
        (lambda y_true, y_pred: [y_true, y_pred], [2, 1], {"output", "target"}),  # as scikit-learn's metrics
        (lambda target, output: [target, output], [2, 1], {"output", "target"}),
        (lambda output, x: [output, x], [1, 3], {"output", "input"}),
        (lambda model, batch: [model, batch], [5, 4], {"model", "batch"}),
        (lambda output, *, progress, scale=7: [output, progress, scale], [1, 6, 7], {"output", "progress"}),
        (lambda *args: list(args), [1, 2], {"output", "target"}),
        (lambda output, **rest: [output, rest], [1, {}], {"output"}),
        (functools.partial(lambda k, output, y: [k, output, y], 8), [8, 1, 2], {"output", "target"}),
        (torch.nn.functional.l1_loss, None, {"output", "target"}),
        (Module(), [3, 1], {"input", "output"}),
    ],
)
def test_a_function_gets_what_it_names(function, gets, needs):
    call = made(function)
    assert call.needs == needs
    if gets is not None:
        assert call(**OFFERED) == gets


def test_a_function_by_position_is_called_as_it_is():
    def plain(a, b):
        return a, b

    def in_order(output, y, scale=1):
        return output, y

    for function in (plain, in_order):
        call = made(function)
        assert call.positional
        assert call.function is function  # nothing stands between
        assert call(**OFFERED) == (1, 2)
    assert not made(lambda y, output: 0).positional
    assert not made(lambda output, y, x: 0).positional
    assert not made(lambda output, *, y: 0).positional


def test_further_arguments_are_bound():
    assert made(lambda output, y, scale: [output, y, scale], scale=9)(**OFFERED) == [1, 2, 9]
    assert made(lambda a, b, scale: [a, b, scale], scale=9)(**OFFERED) == [1, 2, 9]
    assert made(lambda scale, output, y: [output, y, scale], scale=9)(**OFFERED) == [1, 2, 9]


@pytest.mark.parametrize("how", ["keywords", "positions", "one"])
def test_a_forward_takes_a_batchs_inputs_or_its_own_arguments(how):
    def forward(a, b=0):
        return a, b

    called = ModelCall(how).taking_batches(forward)
    batch = {"keywords": {"a": 1, "b": 2}, "positions": (1, 2), "one": 1}[how]
    assert called(batch) == (1, 0 if how == "one" else 2)
    assert called(3, b=4) == (3, 4)
    assert called(a=5) == (5, 0)
    assert called(torch.ones(())) == (1, 0)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda output, other: 0, "has a parameter `other`, and it is called with those of output, y_pred, target, y"),
        (lambda a, batch: 0, "names `batch`, and gets what it names only if output or model is among it"),
        (lambda a: 0, r"cannot be called as \(output, target\): its parameters are \(a\)"),
        (lambda a, b, c: 0, r"cannot be called as \(output, target\)"),
        (min, "does not tell its parameters: wrap it in a def"),
    ],
)
def test_what_cannot_be_called_is_refused(function, says):
    with pytest.raises(UserError, match=says):
        made(function)


def test_a_count_is_called_with_the_targets():
    def counting(function):
        return UserCall(
            "count", function, offers=("target", "input", "batch"), positions=("target",), decides=("target", "batch")
        )

    assert counting(lambda anything: anything)(**OFFERED) == 2
    assert counting(lambda x, y: (x, y))(**OFFERED) == (3, 2)
    assert counting(lambda batch: batch)(**OFFERED) == 4


# --- what is kept for a user on a machine: the first content counts, and what cannot be read or written is no error ---


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "drivetrain"


def test_a_number_is_measured_once(state):
    numbers = iter([0.1 + 0.2, 5.0])
    assert measured_once(["a", 1], lambda: next(numbers)) == 0.1 + 0.2
    assert measured_once(["a", 1], lambda: next(numbers)) == 0.1 + 0.2
    assert measured_once(["a", 2], lambda: next(numbers)) == 5.0
    assert len(list((state / "measured").iterdir())) == 2


def test_of_two_that_measure_at_the_same_time_the_first_to_keep_its_number_counts():
    """Both ranks of a run then choose alike, and choose the same in the next run."""

    def slowly() -> float:
        assert measured_once(["a"], lambda: 1.0) == 1.0  # another process, in the meantime
        return 2.0

    assert measured_once(["a"], slowly) == 1.0


@pytest.mark.parametrize("content", [b"", b"many", b"nan", b"inf", b"-1", b"0", b"\xff", b"1" * 400])
def test_what_is_no_number_is_measured_again(state, content):
    measured_once(["a"], lambda: 1.0)
    (file,) = (state / "measured").iterdir()
    file.write_bytes(content)
    number = measured_once(["a"], lambda: 3.0)
    assert number == 3.0 or (content.startswith(b"1") and math.isfinite(number))
    assert measured_once(["a"], lambda: 4.0) == number


def test_where_nothing_can_be_written_it_is_measured_each_time(state, monkeypatch):
    put(state, "a file in the folder's place")
    assert measured_once(["a"], lambda: 1.0) == 1.0
    assert measured_once(["a"], lambda: 2.0) == 2.0
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home
    assert measured_once(["a"], lambda: 3.0) == 3.0


def test_a_file_is_kept_as_the_first_wrote_it(state):
    keep_first(state / "key", b"one")
    keep_first(state / "key", b"two")
    assert (state / "key").read_bytes() == b"one"
    assert [file.name for file in home.state_dir().iterdir()] == ["key"]
    assert (state / "key").stat().st_mode & 0o77 == 0


# --- only ordinary files are opened, and what stands in their place is never written through ---


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


# --- interpreters that drivetrain starts do not import from the working directory ---


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
    may = {name: text for name, text in modules.items() if re.search(r"open\(|_text\(", text)}  # the others need not be parsed
    found = {name: lines for name, text in may.items() if (lines := without_encoding(text))}
    assert found == {}, "give encoding='utf-8', or use core.files"
