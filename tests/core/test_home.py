"""What is kept for a user on a machine: the first content counts, and what cannot be read or written is no error."""

import math
import os

import pytest

from drivetrain.core.machine import home
from drivetrain.core.machine.home import keep_first, measured_once
from tests.support.put import put


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
    put(state, "a file in the folder's place")
    assert measured_once(["a"], lambda: 1.0) == 1.0
    assert measured_once(["a"], lambda: 2.0) == 2.0
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home
    assert measured_once(["a"], lambda: 3.0) == 3.0


def test_a_file_is_kept_as_the_first_wrote_it(state):
    keep_first(state / "key", b"one")
    keep_first(state / "key", b"two")
    assert (state / "key").read_bytes() == b"one"
    assert [file.name for file in home.state_dir().iterdir()] == ["key"]
    assert (state / "key").stat().st_mode & 0o77 == 0


def test_the_key_is_one_and_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    first = home.sign({"a": [1]})
    assert home.sign({"a": [1]}) == first != home.sign({"a": [2]})
    assert home.is_own({"a": [1]}, first)
    assert not home.is_own({"a": [2]}, first)
    assert not any(home.is_own({"a": [1]}, other) for other in (None, f"é{first}", "\udc80", 5))
    assert home.key_file().stat().st_mode & 0o777 == 0o600
    assert os.listdir(home.key_file().parent) == ["key"]


def test_a_home_that_cannot_be_written_signs_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert home.sign({}) is None
    assert not home.is_own({}, "0" * 64)
