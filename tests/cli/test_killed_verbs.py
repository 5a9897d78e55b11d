"""Verbs that are killed at each of their writes: a file under its own name is whole, and the verb can be repeated.

Of the verbs that measure, the first process is killed: its children end by themselves; what they leave goes with the next one.
"""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from drivetrain.cli import main
from drivetrain.core.machine.forking import ForkedProcess
from tests.support import command, slow
from tests.support.waiting import until

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
    os.write(told, f"{main.main(words)} {writes}".encode())
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


KILLED = f"""
import os, signal, sys
at, first, writes = int(sys.argv[1]), os.getpid(), 0
def look(event, given):
    global writes
    opens = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (opens or event in {CHANGES}) and os.getpid() == first and not str(given[0]).startswith(("/dev", "/proc")):
        writes += 1
        if writes == at:
            os.kill(first, signal.SIGKILL)
sys.addaudithook(look)
from drivetrain.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
RATES = ["rounds=1", "block_s=0.01"]
MEASURES: dict[str, tuple[list[str], list[str], int]] = {  # the words, those after the run's, and writes
    "pack": (["pack", "images", "packed", "--size=8", "--threads=1"], [], 26),
    "certify": (["certify", "precision=bf16", "steps=2"], ["against", "precision=fp32"], 50),
    "compare": (["compare", "optimizer.lr=0.1,0.2", *RATES], [], 60),
    "quality": (["compare", "optimizer.lr=0.1,0.2", *RATES, "quality=true", "seeds=2", "max_seeds=2"], [], 105),
    "tune lr": (["tune", "what=lr", "lr_updates=10"], [], 20),
    "tune": (["tune", "what=workers", "budget_s=20", *RATES], [], 9),
    "ablate": (["ablate", "recipe=fast", "baseline=naive", "only=[precision]", "tables=[alone]", *RATES], [], 60),
    "rehearse": (["rehearse", "budget=3m"], [], 55),
}
SHORT = [("pack", 14), ("certify", 20)]  # between the files of a pair, and while the first run's folder is there
MOMENTS = [(verb, at) for verb, (_, _, writes) in MEASURES.items() for at in range(3, writes, max(1, writes // 12))]


@pytest.mark.parametrize(("verb", "at"), slow.but(SHORT.__contains__, dict.fromkeys((*SHORT, *MOMENTS))))
def test_a_measurement_that_is_killed_is_repeated_and_nothing_is_left(verb, at, tiny, tmp_path):
    words, more, _ = MEASURES[verb]
    place, temporary = command.empty(tmp_path / "place"), command.empty(tmp_path / "tmp")
    if verb == "pack":
        for number in range(12):
            painted(place / "images" / ("train", "val")[number % 3 == 0] / "ab"[number % 2], number)
    else:
        words = [*words, *tiny("runtime.threads=1", "updates=2"), "--out=out", *more]
    env = {"TMPDIR": str(temporary), "XDG_STATE_HOME": str(tmp_path / "state")}
    assert command.run(str(at), *words, cwd=place, how=("-c", KILLED), env=env).code == -signal.SIGKILL
    until(lambda: not [each for each in Path("/proc").glob("[0-9]*/cwd") if place_of(each) == place])
    for new in tmp_path.rglob(".drivetrain-run-*"):  # one that is not locked yet may be another process's that begins
        os.utime(new, (0, 0))
    command.run("0", *words, cwd=place, how=("-c", KILLED), env=env, code=0)
    written = {path.name for path in place.rglob("*") if path.is_file() and path.suffix != ".png"}
    name = words[0]
    assert written == (PACKED if verb == "pack" else {f"{name}.json", f"{name}.html"})
    assert not [path for path in temporary.iterdir() if "drivetrain" in path.name]


PACKED = {".lock", "index.json", *(f"{split}.{part}" for split in ("train", "test") for part in ("data", "table"))}


def painted(folder: Path, number: int) -> None:
    """An image in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 12), (20 * number, 30, 40)).save(folder / f"{number}.png")


def place_of(link: Path) -> Path | None:
    """The working directory of a process; None where it has ended."""
    with contextlib.suppress(OSError):
        return link.readlink()
    return None
