"""The list of faults fits the source, and one fault is planted, seen and taken out again."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.mutations import faults, page, workshop
from bench.mutations.fault import Fault

ROOT = Path(__file__).resolve().parent.parent
FAULT = Fault("one", "core/rng.py", "h ^= h >> 31\n", "h ^= h >> 30\n", "tests/core/test_rng.py", "mix")


def test_each_fault_is_where_the_list_says():
    assert len(faults.ALL) >= 150
    assert workshop.problems(faults.ALL, ROOT) == []


def test_a_list_that_does_not_fit_is_an_error():
    wrong = [FAULT._replace(old="not there"), FAULT._replace(old="h"), FAULT._replace(tests="tests/none.py")]
    assert len(workshop.problems(wrong, ROOT)) == 5  # two of them have the name of the first as well
    with pytest.raises(ValueError, match="has 0 times"):
        wrong[0].plant("")


def test_the_page_names_what_is_not_seen():
    first, second = faults.ALL[:2]
    results = {first.name: {"outcome": "seen"}, second.name: {"outcome": "unseen"}}
    text = page.text({"count": 2, "seen": 1, "share": 0.5, "faults": results})
    assert "| engine | 2 | 1 |" in text
    assert f"- {second.name}" in text
    assert f"- {first.name}" not in text


@pytest.mark.slow
def test_a_fault_is_seen_and_what_is_none_is_not():
    with workshop.Workshop(ROOT) as made:
        copy = made.root / "src/drivetrain/core/rng.py"
        before = copy.read_text()
        none = made.judge(FAULT._replace(new="h ^= h >> 31  # the same\n"), 120)
        seen = made.judge(FAULT._replace(new="h = 0\n"), 120)
        assert copy.read_text() == before == (ROOT / "src/drivetrain/core/rng.py").read_text()
        assert (none.outcome, seen.outcome) == (workshop.UNSEEN, workshop.SEEN)
        assert seen.by.startswith("tests/core/test_rng.py::")
        assert made.failing_without_fault([seen.by]) == []
    assert not made.root.exists()
