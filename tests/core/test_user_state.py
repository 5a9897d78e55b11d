"""What is kept for a user on a machine: the first content counts, and what cannot be read or written is no error."""

import math

import pytest

from drivetrain.core import user_state
from drivetrain.core.user_state import keep_first, measured_once


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "drivetrain"


def test_a_number_is_measured_once(state):
    numbers = iter([0.1 + 0.2, 5.0])
    assert measured_once(["a", 1], lambda: next(numbers)) == 0.1 + 0.2
    assert measured_once(["a", 1], lambda: next(numbers)) == 0.1 + 0.2
    assert measured_once(["a", 2], lambda: next(numbers)) == 5.0
    assert len(list((state / "measured").iterdir())) == 2


def test_of_two_that_measure_at_the_same_time_the_first_to_keep_its_number_counts():
    """Both ranks of a run then choose alike, and choose the same in the next run."""

    def slowly() -> float:
        assert measured_once(["a"], lambda: 1.0) == 1.0  # another process, in the meantime
        return 2.0

    assert measured_once(["a"], slowly) == 1.0


@pytest.mark.parametrize("content", [b"", b"many", b"nan", b"inf", b"-1", b"0", b"\xff", b"1" * 400])
def test_what_is_no_number_is_measured_again(state, content):
    measured_once(["a"], lambda: 1.0)
    (file,) = (state / "measured").iterdir()
    file.write_bytes(content)
    number = measured_once(["a"], lambda: 3.0)
    assert number == 3.0 or (content.startswith(b"1") and math.isfinite(number))
    assert measured_once(["a"], lambda: 4.0) == number


def test_where_nothing_can_be_written_it_is_measured_each_time(state, monkeypatch):
    state.parent.mkdir(parents=True)
    state.write_text("a file in the folder's place")
    assert measured_once(["a"], lambda: 1.0) == 1.0
    assert measured_once(["a"], lambda: 2.0) == 2.0
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home
    assert measured_once(["a"], lambda: 3.0) == 3.0


def test_a_file_is_kept_as_the_first_wrote_it(state):
    keep_first(state / "key", b"one")
    keep_first(state / "key", b"two")
    assert (state / "key").read_bytes() == b"one"
    assert [file.name for file in user_state.user_state().iterdir()] == ["key"]
    assert (state / "key").stat().st_mode & 0o77 == 0
