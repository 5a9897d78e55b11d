"""Verbs that are killed at each of their writes: a file under its own name is whole, and the verb can be repeated."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.core.machine.forking import ForkedProcess
from tests.support import slow

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.truncate", "os.rmdir")
VERBS: dict[str, tuple[list[str], str]] = {  # the words, and the file that they write: of the run where it begins with "run/"
    "predict csv": (["predict", "run", "--data", "test", "--out", "out.csv"], "out.csv"),
    "predict jsonl": (["predict", "run", "--data", "test", "--out", "out.jsonl"], "out.jsonl"),
    "export": (["export", "run", "out.safetensors"], "out.safetensors"),
    "card": (["card", "run"], "run/README.md"),
    "recipe": (["recipe", "export", "run", "out.yaml"], "out.yaml"),
    "report": (["report", "run"], "run/report.html"),
}
CHANGING = {"report"}  # its page says when it was written


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., list[str]]) -> Path:
    """A finished run, to be copied."""
    import drivetrain

    place = tmp_path_factory.mktemp("finished")
    result = drivetrain.train(tiny(f"output_dir={place}"))
    assert result.run_dir is not None
    return result.run_dir


def _run(words: list[str], at: int, told: int) -> None:
    """In a process of its own: do the verb, and be killed before the write of this number; tell the exit code and the writes."""
    writes = 0

    def look(event: str, given: tuple[object, ...]) -> None:
        nonlocal writes
        opens = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (opens or event in CHANGES) and not str(given[0]).startswith(("/dev", "/proc")):
            writes += 1
            if writes == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    code = main.main(words)
    os.write(told, f"{code} {writes}".encode())
    os._exit(0)


def killed(words: list[str], at: int = 0) -> tuple[int, int]:
    """The exit code of a verb that is killed there, and the number of its writes."""
    reading, writing = os.pipe()
    process = ForkedProcess(target=_run, args=(words, at, writing))
    process.start()
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read().split()
    process.join()
    return (int(said[0]), int(said[1])) if said else (process.exitcode or 0, at)


def moments(writes: int, whole: bool) -> Iterator[int]:
    """The writes at which it is killed: all, or the first and the last two."""
    yield from range(1, writes + 1) if whole else sorted({1, max(1, writes - 1), writes})


@pytest.mark.parametrize(
    ("verb", "whole"), slow.but(lambda case: not case[1], [*((verb, False) for verb in VERBS), *((verb, True) for verb in VERBS)])
)
def test_a_verb_that_is_killed_leaves_whole_files_and_can_be_repeated(finished, tmp_path, monkeypatch, verb, whole):
    (words, name), place = VERBS[verb], tmp_path / "place"

    def anew() -> bytes | None:
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(finished, place / "run")
        monkeypatch.chdir(place)
        return content()

    def content() -> bytes | None:
        return Path(name).read_bytes() if Path(name).exists() else None

    anew()
    code, writes = killed(words)
    assert (code, writes > 0) == (0, True)
    expected, names = content(), {path.name for path in place.iterdir()}
    for at in moments(writes, whole):
        before = anew()
        assert killed(words, at)[0] == -signal.SIGKILL, at
        found = content()
        assert found in (before, expected) or (verb in CHANGING and found is not None and found.rstrip().endswith(b"</html>")), at
        assert killed(words)[0] == 0
        assert content() == expected or verb in CHANGING, at
        assert {path.name for path in place.iterdir()} == names, at
