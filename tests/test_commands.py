"""The commands that README.md and docs/ print: bash and zsh give them the same words, and each does what it says."""

import re
import shutil

import pytest

from drivetrain.cli.main import main
from tests.support import printed

COMMANDS = list(printed.commands())
PLACEHOLDERS = "<…"  # outputs/<date>/<run>: the reader puts something in its place


def test_there_are_commands_to_look_at():
    assert len(COMMANDS) > 100
    assert {"README.md", "docs/data.md", "examples/slow_loss/README.md"} <= {command.page for command in COMMANDS}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_gives_each_command_the_words_that_are_meant(shell, tmp_path):
    """Unquoted brackets, braces and wildcards: zsh ends at those that match no file, and both put others in their place."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    found = [
        command for command in COMMANDS if not set(PLACEHOLDERS) & set(command.text) and not {"|", ">", "&&"} & set(command.words)
    ]
    assert len(found) > 100
    said, complaints = printed.words_by(shell, [command.text for command in found], tmp_path / "empty")
    assert complaints == ""
    home = str(tmp_path / "empty")
    for command, words in zip(found, said, strict=True):
        meant = [home + word[1:] if word.startswith("~/") else word for word in command.words]
        assert [word.replace("=~/", f"={home}/") for word in words] == [w.replace("=~/", f"={home}/") for w in meant], command


def test_commands_of_the_pages_fit_a_narrow_column():
    """On the site and in half a screen no command is cut off: it is broken with a backslash."""
    pages = [page for page in printed.PAGES if page.is_relative_to(printed.ROOT / "docs")]
    lines = [(page.name, line) for page in pages for line in printed.lines(page)]
    assert len(lines) > 300
    assert [(name, line) for name, line in lines if len(line) > printed.WIDEST] == []


def test_comments_can_be_pasted_into_zsh_too(capsys):
    """In zsh # begins no comment unless it was told so: the command drops it, and the shell finds nothing to do in it."""
    for command in COMMANDS:
        assert not command.comment or command.words[0] == "drivetrain" or command.words[2] == "src.train", command
        assert not re.search(r"""['"`?*()\[\]{}<>;&|$!~^\\]|\B=""", command.comment), command
    assert main(["list", "clip", "#", "every", "option", "--plan"]) == 0
    assert "bound the gradients" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_every_command_of_a_page_runs_as_it_is_printed(page, shell, tmp_path):
    """With smaller sizes, in a folder that has what the page speaks of. What is not run here is named with its reason."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    work, failed, left = printed.world(tmp_path, page), {}, {}
    for command in (command for command in COMMANDS if command.page == page):
        if why := printed.why_not(command):
            left[command.text] = why
        elif not command.fails and printed.failed(command, done := printed.run(shell, command, work, tmp_path)):
            failed[command.text] = f"exit code {done.returncode}: {(done.stderr or done.stdout)[-600:]}"
    print("not run here:", *(f"\n  {text}: {why}" for text, why in left.items()))
    assert not failed, "\n".join(f"{text}\n    {why}" for text, why in failed.items())
