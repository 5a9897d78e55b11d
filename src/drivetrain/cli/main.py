"""The command `drivetrain`: find the verb, run it, and turn errors into messages and exit codes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from drivetrain import __version__
from drivetrain.cli import verbs
from drivetrain.core.errors import BAD_CONFIG, DONE, FAILED, INTERRUPTED, Interrupted, UserError, wants_traceback
from drivetrain.core.machine.paths import remove_working_directory
from drivetrain.core.machine.signals import ended_by_signals
from drivetrain.core.user import code as user_code
from drivetrain.launch import machine_limits
from drivetrain.recipe import fetch
from drivetrain.ui import output, terminal
from drivetrain.ui.output import PLAIN, echo, echo_traceback, fold


def main(argv: Sequence[str] | None = None, program: bool = False) -> int:
    """Run the command line; its exit code. With `program`, or without `argv`, the process ends with the command."""
    try:
        with ended_by_signals(to_the_end=program or argv is None):  # a run handles them itself
            if argv is None:
                remove_working_directory()
            return _dispatch(_prepared(sys.argv[1:] if argv is None else argv))
    except (KeyboardInterrupt, Interrupted) as error:
        echo(str(error) or "interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if wants_traceback():
            echo_traceback(error)
        code, problems = _answer(error)
        for problem in problems:
            echo(f"error: {problem}", file=sys.stderr)
        return code


def _prepared(argv: Sequence[str]) -> list[str]:
    """Prepare the output; return the words without output options."""
    argv = list(argv)
    if "#" in argv:  # a comment pasted into zsh with its command: zsh reads it as words
        del argv[argv.index("#") :]
    if "--plain" in argv:
        argv.remove("--plain")
        os.environ[PLAIN] = "1"
    terminal.prepare_output()
    fetch.on_fetch[:] = [output.show]
    return argv


def _answer(error: Exception) -> tuple[int, Sequence[str]]:
    """The exit code and message for an error: for a bug of ours one line, and the traceback on demand."""
    if isinstance(error, UserError):
        return BAD_CONFIG, error.problems
    if (limit := machine_limits.explain(error)) is not None:
        return FAILED, [limit]
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return BAD_CONFIG, [f"{str(error.filename)[:60]}… is too long for the name of a file"]
    if isinstance(error, FileNotFoundError) and error.filename is None:  # os.getcwd()
        return BAD_CONFIG, ["the working directory no longer exists: change to another one"]
    if (reason := _of_the_disk(error)) is not None:
        place = getattr(error, "filename", None) or "what this command writes"  # a library in C or Rust names no file
        return FAILED, [f"{place} cannot be written: {reason}. Make room, or give another place"]
    return FAILED, [f"{user_code.told(error)} (DRIVETRAIN_TRACEBACK=1 shows where)"]


def _of_the_disk(error: Exception) -> str | None:
    """The reason of a failed write to the disk, in words; None for other errors."""
    from drivetrain.saving import space

    is_of_it = isinstance(error, OSError) and error.errno in space.OF_THE_DISK
    return space.reason_of(error) if is_of_it or "os error" in str(error) else None


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        echo(fold(verbs.overview(__version__)))
        return DONE
    if name == "--version":
        echo(f"drivetrain {__version__}")
        return DONE
    return verbs.find(name).run(argv[1:])
