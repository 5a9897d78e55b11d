"""No text from outside commands the terminal: all that is printed passes ui/output.plain."""

import io
import logging
import re
import warnings
from pathlib import Path
from random import Random

import pytest

import drivetrain
from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.inference.tables import Output
from drivetrain.ui import logs, output
from drivetrain.ui.sheet import Table

EVIL = "a\x1b[31mred\x1b]8;;http://x\x07link\x9b2J\rover\u202eturned\ufeff\udcff"
IN_REPORTS = EVIL[:-1]  # pytest-xdist cannot send half a character
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
PACKAGE = Path(drivetrain.__file__).parent
# What draws and cleans by itself, and child processes that print words of their own.
MAY_PRINT = {
    "ui/output.py",
    "ui/logs.py",
    "ui/progress.py",
    "core/nvidia_driver.py",
}


def test_a_text_keeps_what_can_be_seen_and_nothing_else():
    random = Random(0)
    for _ in range(300):
        tops = random.choices((0x100, 0x3000, 0x110000), k=20)
        text = "".join(chr(random.randrange(top)) for top in tops)
        shown = output.plain(text)
        assert not COMMANDS.search(shown), ascii(text)
        if shown != text:
            assert COMMANDS.search(text) or re.search("[\u061c\u200e\u200f\u2028\u2029\ufeff\U000e0000-\U000e007f]", text)


def test_ordinary_text_stays_as_it_is():
    text = "tab\t café ± – … 日本語 👩‍💻 \\x1b line\nnext"
    assert output.plain(text) == text
    assert output.plain("a\r\nb") == "a\nb"


def test_errors_of_a_command(capsys, monkeypatch):
    def fail(argv):
        raise UserError(f"{EVIL} is no key")

    monkeypatch.setattr(main, "_dispatch", fail)
    assert main.main([]) == 2
    said = capsys.readouterr().err
    assert "[31mred" in said
    assert not COMMANDS.search(said)


def test_keys_on_the_command_line(capsys):
    for word in (f"model.{EVIL[:-1]}=1", f"recipe={EVIL[:-1]}", f"model={EVIL[:-1]}"):
        assert main.main(["train", word]) == 2
        said = capsys.readouterr()
        assert not COMMANDS.search(said.out + said.err), said


@pytest.mark.parametrize("live", [True, False])
def test_tables(live, capsys, monkeypatch):
    monkeypatch.setattr(output, "can_redraw", lambda stream: live)
    Table(("", f"column {EVIL}"), [("status", EVIL)]).show()
    said = capsys.readouterr().out
    assert "\\x1b" in said
    assert "\x1b[31m" not in said
    assert not COMMANDS.search(re.sub("\x1b\\[[0-9;]*m", "", said))  # beside rich's own colours


def test_a_live_line(monkeypatch):
    console = output.console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(EVIL, markup=False, highlight=False)
    assert not COMMANDS.search(console.file.getvalue())


def test_messages_and_log_txt(tmp_path, capsys):
    logs.configure()
    with logs.to_file(tmp_path / "log.txt"):
        logging.getLogger("drivetrain.x").warning("class %s", IN_REPORTS)
    for said in (capsys.readouterr().err, (tmp_path / "log.txt").read_text()):
        assert "class a\\x1b[31mred" in said
        assert not COMMANDS.search(said)


def test_warnings_of_libraries(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        output.warn_plainly()
        warnings.warn(IN_REPORTS, stacklevel=1)
    said = capsys.readouterr().err
    assert "\\x1b[31mred" in said
    assert not COMMANDS.search(said)


def test_predictions_on_a_terminal(capsys, monkeypatch):
    import sys

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with Output(None) as out:
        out.write([{"input": EVIL, "label": "a"}])
    assert not COMMANDS.search(capsys.readouterr().out)


def test_the_program_prints_by_echo_alone():
    """A new `print`, or a rich console of its own, would let text from outside through."""
    printing = re.compile(r"(?<![\w.])print\(|\bConsole\(|print_exc")
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = [name for name, text in files.items() if printing.search(text) and name not in MAY_PRINT]
    assert not found, f"{found}: use drivetrain.ui.output.echo or .console"
