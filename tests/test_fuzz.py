"""The campaign of odd input, `bench.fuzz`: a short form of each kind, and the whole."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.fuzz import damage, datasets, isolated
from bench.fuzz.isolated import KINDS, run
from bench.fuzz.judged import ACCEPTED, DEFECT, REFUSED, Ended, Example, judged

from drivetrain.core.errors import UserError

SHORT = {"commands": 12, "datasets": 40}  # recipes are in tests/recipe/test_fuzz.py, runs and checkpoints in tests/saving


@pytest.mark.parametrize("kind", SHORT)
def test_odd_input_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    examples = importlib.import_module(f"bench.fuzz.{kind}").examples
    ended = [judged(example) for example in examples(tmp_path, SHORT[kind], seed=7)]
    assert [each for each in ended if each.outcome == DEFECT] == []
    assert {each.outcome for each in ended} == {ACCEPTED, REFUSED}


def test_a_campaign_goes_on_and_judges_defects_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[int]] = []
    bad = {1, 3}

    def judged_of(kind: str, count: int, seed: int, done: dict[int, Ended]) -> list[Ended]:
        asked.append(set(range(count)) - set(done))
        return [Ended(f"{kind} {n}", DEFECT if n in bad else ACCEPTED) for n in range(count) if n not in done]

    monkeypatch.setattr(isolated, "_judged", judged_of)
    monkeypatch.setattr(isolated, "SHARE", 4)
    journal = tmp_path / "journal"
    assert run(["runs"], 8, 0, journal=journal)["runs"][DEFECT] == 4
    assert run(["runs"], 8, 0, journal=journal)["runs"][DEFECT] == 4
    assert asked == [{0, 1, 2, 3}] * 2
    bad.remove(1)
    assert run(["runs"], 8, 0, journal=journal, again=True)["runs"][DEFECT] == 2
    assert asked[2:] == [{1, 3}] * 2
    found = run(["runs"], 8, 0, journal=journal)["runs"]
    assert (found["examples"], found[DEFECT], [each["made"] for each in found["wrong"]]) == (8, 2, ["runs 3"] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_of_each_kind(kind: str) -> None:
    found = run([kind], 10_000, seed=1)[kind]
    assert found["wrong"] == []
    assert found["examples"] == 10_000


def fail() -> None:
    raise KeyError("x")


def refuse(text: str | list[str]) -> None:
    raise UserError(text)


@pytest.mark.parametrize(
    ("read", "outcome", "says"),
    [
        (lambda: None, ACCEPTED, ""),
        (lambda: refuse("set x=1"), REFUSED, "set x=1"),
        (fail, DEFECT, "KeyError"),
        (lambda: refuse(""), DEFECT, "says nothing"),
        (lambda: refuse(["x" * 1900] * 9), DEFECT, "too much"),
        (lambda: Path("written").write_text("x"), DEFECT, "effect: writes written"),
        (lambda: Path("/etc/hostname").read_text(), DEFECT, "effect: reads /etc/hostname"),
        (lambda: bytes(2**36), DEFECT, "MemoryError"),  # more than this process can have freed before
    ],
)
def test_what_counts_as_a_defect(read: Callable[[], object], outcome: str, says: str) -> None:
    ended = judged(Example("by hand", read))
    assert ended.outcome == outcome
    assert says in ended.said


def test_what_computes_for_ever_is_stopped() -> None:
    def spin() -> None:
        while True:
            pass

    assert "TooLong" in judged(Example("by hand", spin, seconds=0.05)).said


def test_a_link_in_a_data_folder_may_be_followed_and_no_other_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "table.csv").symlink_to("/etc/hostname")
    (tmp_path / "itself").symlink_to("itself")
    readable = (tmp_path, *datasets.linked(tmp_path))
    assert judged(Example("by hand", (tmp_path / "table.csv").read_bytes, readable)).outcome == ACCEPTED
    assert "effect: reads" in judged(Example("by hand", Path("/etc/passwd").read_bytes, readable)).said


@pytest.mark.parametrize("how", damage.IN_PLACE)
def test_every_stand_in_can_be_made_and_removed(how: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text("{}")
    damage.remove(file)
    damage.IN_PLACE[how](file)
    assert file.is_symlink() or file.exists() or how == "nothing"
    damage.remove(file)
    assert list(tmp_path.iterdir()) == []
