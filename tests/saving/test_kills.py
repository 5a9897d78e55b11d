"""Short forms of bench.kills and bench.faults."""

import json
import os
from pathlib import Path
from random import Random

import pytest
import torch
from bench import faults, harness, kills, syscalls

from tests.support import command, same_end, traced

NAMES = ("sync", "single", "fp32", "last")


class NoMore(Random):
    """Draws no further kill."""

    def random(self) -> float:
        return 0.9


@pytest.mark.skipif(not syscalls.SUPPORTED, reason="system calls are watched on Linux on x86-64 alone")
def test_a_run_that_is_killed_within_a_save_comes_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = kills.unbroken(NAMES, tmp_path)
    assert reference.calls > 50
    monkeypatch.setattr(kills.Kill, "drawn", lambda _: kills.Kill("call", 0.4, "SIGKILL", "all"))
    files_open = len(os.listdir("/proc/self/fd"))
    case = kills.judge(NAMES, reference, NoMore(), tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= files_open, "a campaign of a thousand runs has no more than a test of one"
    (kill,) = case.kills
    assert kill.startswith("SIGKILL to all before: ")
    assert case.outcome == kills.SAME, case
    file = reference.run_dir / "metrics.jsonl"
    file.write_text(file.read_text().replace('"update": 3,', '"update": 4,', 1))
    assert same_end.differences(reference.run_dir, reference.run_dir) == []
    copy = tmp_path / "copy"
    copy.symlink_to(reference.run_dir)
    monkeypatch.setattr(same_end, "losses", lambda run_dir: run_dir.name)
    assert same_end.differences(copy, reference.run_dir) == ["losses"]


@pytest.mark.slow
@pytest.mark.skipif(not syscalls.SUPPORTED, reason="system calls are watched on Linux on x86-64 alone")
def test_kills_of_many_combinations() -> None:
    cases = kills.campaign(24, 1, 2)
    assert [case for case in cases if case.outcome != kills.SAME] == []
    assert len(cases) == 24


def test_each_gradient_has_a_hash(tmp_path: Path) -> None:
    """So two runs that should be the same tell the update and the parameter at which they part."""
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.SGD(weights)
    for value in (1.0, 1.0, 1.0078125):  # a unit in the last place
        weights[0].grad, weights[1].grad = torch.full_like(weights[0], value), torch.ones(2, 2)
        traced.hash_gradients(optimizer)
    (file,) = tmp_path.glob("gradients-*.jsonl")
    first, same, other = map(json.loads, file.read_text().splitlines())
    assert first == same
    assert [a == b for a, b in zip(first["gradients"], other["gradients"], strict=True)] == [False, True]
    assert first["weights"] == other["weights"]


def test_hashes_are_written_in_a_run(tmp_path: Path) -> None:
    place = harness.place_in(tmp_path, "traced.py")
    names = ("sync", "single", traced.HASHED, "last")
    command.train(*kills.words_of(names), cwd=place, env={"HASHES": "1"}, code=0)
    (file,) = place.glob("gradients-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 14
    assert len({row["weights"][0] for row in rows}) == 14, "each update changes them"
    assert all(len(row["gradients"]) == len(row["weights"]) == 8 for row in rows)


def test_what_ends_of_a_killed_run_are_faults() -> None:
    assert kills._wrong(kills.Ended(-9, "", "SIGKILL to all")) is None
    assert kills._wrong(kills.Ended(75, "error: stopped", "SIGTERM to all")) is None
    assert kills._wrong(kills.Ended(0, "", "")) is None
    for ended, outcome in (
        (kills.Ended(None, "", "SIGKILL to all"), kills.HANGS),
        (kills.Ended(1, "Traceback (most recent call last)", "SIGKILL to all"), kills.UNTYPED),
        (kills.Ended(1, "", "SIGKILL to all"), kills.UNTYPED),
        (kills.Ended(-11, "", "SIGKILL to all"), kills.UNTYPED),
        (kills.Ended(2, "error: in use", "SIGKILL to all"), kills.STUCK),
        (kills.Ended(1, "error: no", ""), kills.STUCK),
    ):
        found = kills._wrong(ended)
        assert found is not None
        assert found[0] == outcome


def test_a_fault_is_judged_by_what_is_stated(tmp_path: Path) -> None:
    """A run that is asked to end; the row says so, and another statement of it does not hold."""
    (fault,) = [fault for fault in faults.FAULTS if fault.strike == "told_to_end"]
    row = faults.plant(fault._replace(resumes=False), tmp_path, lambda _: tmp_path)
    assert (row.exit, row.result, row.checkpoints, row.wrong) == (75, "interrupted", ["8", "9"], [])
    (place,) = tmp_path.iterdir()
    done = faults.Done(1, "", "Traceback\nerror: one\nerror: two\n")
    wrong = faults._judged(fault._replace(resumes=False, says="three"), done, place, lambda _: tmp_path).wrong
    assert [w.split(":")[0] for w in wrong] == [
        "exit code 1 instead of 75",
        "a traceback",
        "2 errors",
        "the message is not 'three'",
    ]


@pytest.mark.slow
def test_every_fault_ends_as_stated() -> None:
    rows, _ = faults.campaign(faults.FAULTS)
    assert [row for row in rows if row.wrong] == []


def test_the_docs_have_the_table_of_faults() -> None:
    page = (Path(faults.__file__).parents[1] / faults.TABLE).read_text()
    assert faults.markdown(faults.FAULTS) in page
