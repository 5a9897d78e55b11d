"""A run in a terminal: within its width, without what it cannot draw, and with what was set marked."""

import io
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from random import Random

import pytest

import drivetrain
from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.inference import predict
from drivetrain.launch.job import prepare
from drivetrain.ui import logs, output, recipe_tree, terminal
from drivetrain.ui.sheet import Table

RECORD = {
    "epoch": 3, "update": 1200, "loss": 0.123456, "lr": 3e-4, "samples_per_second": 12345.6, "mfu": 0.41, "data_wait": 0.02,
    "rank_work_excess": 0.3, "slowest_rank": 5,
}  # fmt: skip


@pytest.fixture
def at_a_terminal(monkeypatch, capsys):
    """A terminal of 80 columns, whose powers nothing in the environment denies. Gives what was printed since the last call."""
    for name in ("NO_COLOR", output.PLAIN, "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: True)  # capsys makes another object for the test itself
    return lambda: capsys.readouterr().out


def shown(at_a_terminal, words=("model=mlp", "optimizer.lr=0.01")):
    job = prepare(words)
    recipe_tree.show_recipe(job.composed, job.run)
    return at_a_terminal()


def test_a_terminal_has_colours_and_no_color_takes_them_away(at_a_terminal, monkeypatch):
    assert "\x1b[36m" in shown(at_a_terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown(at_a_terminal)
    assert not any(f"\x1b[{code}m" in plain for code in (*range(30, 38), *range(90, 98)))
    assert "├── optimizer     adamw" in plain


def test_what_the_mark_means_is_told_where_only_a_length_has_it(at_a_terminal):
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown(at_a_terminal, ("epochs=8",)))
    assert "epochs        8*\n* set by an override" in plain
    assert "* set by" not in shown(at_a_terminal, ())
    (task, data) = plain.splitlines()[1:3]
    assert task.index(" changes") == data.index(" changes")  # the columns of the longest option are those of the others


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), (output.PLAIN, "1")])
def test_a_dumb_terminal_and_plain_get_lines_as_a_file_does(name, value, at_a_terminal, monkeypatch):
    assert terminal.is_live()
    monkeypatch.setenv(name, value)
    assert not terminal.is_live()
    assert output.fold("a " * 90) == "a " * 90
    Table(("a", "b"), [("1", "2")]).show()
    said = at_a_terminal()
    assert "┃" not in said
    assert "\x1b" not in said + shown(at_a_terminal)
    assert shown(at_a_terminal).startswith("recipe default: task=classification data=digits")


def test_plain_is_a_flag_of_every_command(monkeypatch, capsys):
    monkeypatch.setenv(output.PLAIN, "")
    del os.environ[output.PLAIN]
    assert main.main(["recipe", "list", "--plain"]) == 0
    assert os.environ[output.PLAIN] == "1"
    assert "digits_fast" in capsys.readouterr().out


def test_the_tree_marks_what_was_set(at_a_terminal):
    tree = {line.group: line for line in recipe_tree.lines(prepare(["recipe=fast", "optimizer.lr=0.02"]).composed)}
    assert tree["optimizer"].option_set  # by the recipe
    assert {setting for setting, was_set in tree["optimizer"].settings if was_set} == {"lr=0.02", "fused=true"}
    assert not tree["data"].option_set
    assert not any(was_set for _, was_set in tree["data"].settings)
    lines = shown(at_a_terminal).splitlines()
    assert any("optimizer" in line and "lr=0.01*" in line for line in lines)
    assert any("mlp*" in line for line in lines)
    assert lines[-1].endswith("* set by an override or the recipe, not by default\x1b[0m")
    assert len(lines) < 30  # one for each group: what is too long is cut


@pytest.mark.parametrize("room", [40, 60, 80, 100, None])
def test_a_record_fits_the_room_and_keeps_what_matters(room, monkeypatch):
    monkeypatch.setattr("drivetrain.core.machine.device.memory_now", lambda: 2**30)
    line = terminal.ProgressLine(5000, 10)._text(RECORD, room)
    assert "epoch 4/10" in line
    assert "loss 0.1235" in line
    assert ("lr 3.00e-04" in line) == (room is None or room >= 100)
    assert room is None or len(line) <= room


def test_a_live_line_says_how_long_the_run_still_takes(at_a_terminal, monkeypatch):
    clock = iter([100.0, 110.0, 110.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock, 110.0))
    line = terminal.ProgressLine(5000, 10, done=1000)  # a resumed run: its pace is that of 200 updates in 10 s
    assert line._left(1200) == "about 3 min left"
    assert line._left(5000) == ""
    line.close()


def test_a_help_text_is_folded_below_its_last_column(at_a_terminal):
    folded = output.fold("  -q, --quiet           " + "word " * 20 + "\nshort")
    assert folded.splitlines()[-1] == "short"
    assert all(len(line) <= 80 for line in folded.splitlines())
    assert folded.splitlines()[1].startswith(" " * 24 + "word")
    assert output.fold("x" * 200) == "x" * 200  # a path stays whole


# --- no text from outside commands the terminal: all that is printed passes ui/output.plain ---

EVIL = "a\x1b[31mred\x1b]8;;http://x\x07link\x9b2J\rover\u202eturned\ufeff\udcff"
IN_REPORTS = EVIL[:-1]  # pytest-xdist cannot send half a character
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
PACKAGE = Path(drivetrain.__file__).parent
# What draws and cleans by itself, and child processes that print words of their own.
MAY_PRINT = {
    "ui/output.py",
    "ui/logs.py",
    "ui/progress.py",
    "core/machine/nvidia_driver.py",
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


def test_errors_of_a_command_and_keys_on_its_line(capsys, monkeypatch):
    def fail(argv):
        raise UserError(f"{EVIL} is no key")

    said = []
    for word in (f"model.{EVIL[:-1]}=1", f"recipe={EVIL[:-1]}", f"model={EVIL[:-1]}"):
        assert main.main(["train", word]) == 2
        said.append(capsys.readouterr())
    monkeypatch.setattr(main, "_dispatch", fail)
    assert main.main([]) == 2
    said.append(capsys.readouterr())
    assert "[31mred" in said[-1].err
    assert not any(COMMANDS.search(each.out + each.err) for each in said)


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


def test_messages_log_txt_and_warnings_of_libraries(tmp_path, capsys):
    logs.configure()
    with logs.to_file(tmp_path / "log.txt"):
        logging.getLogger("drivetrain.x").warning("class %s", IN_REPORTS)
    said = [capsys.readouterr().err, (tmp_path / "log.txt").read_text()]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        output.warn_plainly()
        warnings.warn(IN_REPORTS, stacklevel=1)
    for each in (*said, capsys.readouterr().err):
        assert "a\\x1b[31mred" in each
        assert not COMMANDS.search(each)


def test_predictions_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with predict.output(None) as write:
        write([{"input": EVIL, "label": "a"}])
    assert not COMMANDS.search(capsys.readouterr().out)


def test_the_program_prints_by_echo_alone():
    """A new `print`, or a rich console of its own, would let text from outside through."""
    printing = re.compile(r"(?<![\w.])print\(|\bConsole\(|print_exc")
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = [name for name, text in files.items() if printing.search(text) and name not in MAY_PRINT]
    assert not found, f"{found}: use drivetrain.ui.output.echo or .console"


# --- log messages: what is shown of them, where, by which rank, and that nothing is shown twice ---


LOG = logging.getLogger("drivetrain.some.module")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before():
    """The logger is this test's alone."""
    level, handlers = logs.ROOT.level, list(logs.ROOT.handlers)
    yield
    logs.ROOT.setLevel(level)
    logs.ROOT.handlers[:] = handlers
    logs.configure()


def log_all() -> None:
    LOG.debug("a detail")
    LOG.info("an info")
    LOG.warning("a %s", "warning")
    LOG.error("an error")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "an info\na warning\nerror: an error\n"),
        ({"quiet": True}, "a warning\nerror: an error\n"),
        ({"rank": 1}, "rank 1: an error\n"),
        ({"rank": 1, "shared": False}, "an info\na warning\nrank 1: an error\n"),
    ],
)
def test_which_messages_are_shown(settings, said, capsys):
    """One line for each, also where the settings replace others."""
    logs.configure(quiet=not settings.get("quiet"))
    logs.configure(**settings)
    log_all()
    assert capsys.readouterr() == ("", said)


def test_the_root_logger_is_left_alone(caplog):
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    logs.configure()
    LOG.info("a message")
    assert (root.level, root.handlers) == before
    assert caplog.messages == ["a message"], "it still reaches the handlers of the program"


def test_a_program_that_prints_its_logs_itself_gets_no_second_line():
    code = (
        "import logging; logging.basicConfig(level=logging.INFO, format='mine: %(message)s')\n"
        "from drivetrain.ui import logs; logs.configure(); logging.getLogger('drivetrain.x').info('a message')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "mine: a message\n"


def test_the_file_has_what_rank_0_says_with_time_level_and_rank_even_under_quiet(tmp_path, capsys):
    logs.configure(quiet=True)
    with logs.to_file(tmp_path / "log.txt"):
        if (child := os.fork()) == 0:
            logs.configure(rank=1)
            LOG.warning("of rank 1")
            os._exit(0)
        os.waitpid(child, 0)
        log_all()
    LOG.warning("after the run")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO rank 0 drivetrain.some.module: an info",
        "WARNING rank 0 drivetrain.some.module: a warning",
        "ERROR rank 0 drivetrain.some.module: an error",
    ]
    capsys.readouterr()
    with logs.to_file(tmp_path / "nowhere" / "log.txt"):  # a file that cannot be written is no error
        LOG.warning("a warning")
    assert capsys.readouterr().err == "a warning\n"


def test_a_message_goes_above_the_live_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    logs.configure()
    progress = terminal.ProgressLine(10, 1)
    LOG.warning("[a warning] in brackets")
    progress.close()
    LOG.warning("after it")
    shown = out.getvalue()
    before, _, after = shown.partition("[a warning] in brackets")
    assert "starting" in before
    assert before.rpartition("starting")[2].count("\x1b[2K"), "the live line is cleared first"
    assert "starting" in after, "and drawn again below"
    assert shown.endswith("after it\n")
    assert shown.count("[a warning]") == shown.count("after it") == 1


def test_standard_error_that_is_a_file_stays_the_place_while_a_line_is_live(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, err = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    logs.configure()
    progress = terminal.ProgressLine(10, 1)
    LOG.warning("a warning")
    progress.close()
    assert err.getvalue() == "a warning\n"
    assert "a warning" not in out.getvalue()


def test_a_forked_process_has_no_live_line(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    progress = terminal.ProgressLine(10, 1)
    if (child := os.fork()) == 0:
        os._exit(0 if logs._console.live is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert logs._console.live is not None
    progress.close()
    assert logs._console.live is None
