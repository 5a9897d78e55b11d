"""Log messages: what is shown of them, where, by which rank, and that nothing is shown twice."""

import io
import logging
import os
import subprocess
import sys

import pytest

from drivetrain.ui import logs, terminal

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


def test_one_line_for_each_message_on_standard_error(capsys):
    logs.configure()
    log_all()
    assert capsys.readouterr() == ("", "an info\na warning\nerror: an error\n")


def test_quiet_shows_warnings_and_errors(capsys):
    logs.configure(quiet=True)
    log_all()
    assert capsys.readouterr().err == "a warning\nerror: an error\n"


def test_a_second_call_replaces_the_first(capsys):
    logs.configure(quiet=True)
    logs.configure()
    LOG.info("once")
    assert capsys.readouterr().err == "once\n"


def test_another_rank_shows_errors_alone_and_all_where_the_output_is_its_own(capsys):
    logs.configure(rank=1)
    log_all()
    assert capsys.readouterr().err == "rank 1: an error\n"
    logs.configure(rank=1, shared=False)
    log_all()
    assert capsys.readouterr().err == "an info\na warning\nrank 1: an error\n"


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


def test_the_file_has_time_level_and_rank_even_under_quiet(tmp_path, capsys):
    logs.configure(quiet=True)
    with logs.to_file(tmp_path / "log.txt"):
        log_all()
    LOG.warning("after the run")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO rank 0 drivetrain.some.module: an info",
        "WARNING rank 0 drivetrain.some.module: a warning",
        "ERROR rank 0 drivetrain.some.module: an error",
    ]


def test_the_file_has_rank_0_alone(tmp_path):
    with logs.to_file(tmp_path / "log.txt"):
        if (child := os.fork()) == 0:
            logs.configure(rank=1)
            LOG.warning("of rank 1")
            os._exit(0)
        os.waitpid(child, 0)
        LOG.warning("of rank 0")
    assert "of rank 0" in (tmp_path / "log.txt").read_text()
    assert "of rank 1" not in (tmp_path / "log.txt").read_text()


def test_a_file_that_cannot_be_written_is_no_error(tmp_path, capsys):
    with logs.to_file(tmp_path / "nowhere" / "log.txt"):
        LOG.warning("a warning")
    assert capsys.readouterr().err == "a warning\n"


def test_a_message_goes_above_the_live_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    logs.configure()
    progress = terminal.Progress(10, 1)
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
    progress = terminal.Progress(10, 1)
    LOG.warning("a warning")
    progress.close()
    assert err.getvalue() == "a warning\n"
    assert "a warning" not in out.getvalue()


def test_a_forked_process_has_no_live_line(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    progress = terminal.Progress(10, 1)
    if (child := os.fork()) == 0:
        os._exit(0 if logs._console.live is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert logs._console.live is not None
    progress.close()
    assert logs._console.live is None
