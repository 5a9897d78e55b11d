"""What a run says of the machine and of the code in its working directory."""

import os
import subprocess
from pathlib import Path

import pytest

from drivetrain.run import environment


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ("cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\nstepping\t: 1\n", "AMD EPYC (family 25, model 1)"),
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n", "AMD EPYC (family 25, model 17)"),
        ("model name\t: Cortex\n", "Cortex"),
    ],
)
def test_processors_of_one_name_are_told_apart(facts: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of one are not compared with those of the other: they differ by what they have in hardware."""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: facts)
    assert environment.processor() == name


def git(*words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True, capture_output=True)


def test_a_strangers_repository_runs_nothing() -> None:
    """A run records the commit of the working directory, whose config can name programs for changed files."""
    git("init", "-q", ".")
    Path("a.txt").write_text("a\n")
    Path(".gitattributes").write_text("* filter=x=y\n")
    git("add", "a.txt", ".gitattributes")
    git("commit", "-qm", "a")
    commit = environment._git_commit()
    assert commit is not None
    assert len(commit) == 40
    for key in ("clean", "process", "smudge"):
        git("config", f"filter.x=y.{key}", "touch ran; cat")
    git("config", "filter.x=y.required", "true")
    git("config", "core.fsmonitor", "touch ran")
    os.utime("a.txt", (1, 1))  # so that git compares what is in it
    assert environment._git_commit() == commit
    Path("a.txt").write_text("b\n")
    assert environment._git_commit() == f"{commit}-dirty"
    assert not Path("ran").exists()
