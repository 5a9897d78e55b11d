"""What the doctor tells of, and of what it is silent: on made-up profiles, just below and above each threshold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.measure.profile import diagnose as doctor
from drivetrain.measure.profile.attribution import Line
from drivetrain.measure.profile.step import Threads


def profile(**given: Any) -> Any:
    """An update of 100 ms, 100 of them in an epoch of 10 s."""
    usual: dict[str, Any] = {
        "step_ms": 100.0, "phases": {"data wait": 0.0, "forward": 100.0}, "lines": [], "evaluation_s": 0.0, "saving_s": None,
        "updates": 100, "larger_batch": None, "micro_batch": 8, "read_ms": None, "device": "cpu", "threads": None,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **given})


def job(**loader: Any) -> Any:
    batch = SimpleNamespace(size=lambda epoch: 8, accumulation_steps=1, fixed_micro_batches=True)
    return SimpleNamespace(run=SimpleNamespace(loader=SimpleNamespace(**loader), batch=batch, named=lambda group: f"{group}=x"))


def shares(problems: Any) -> list[float]:
    return [pytest.approx(problem.share, abs=1e-3) for problem in problems]


@pytest.mark.parametrize(("wait", "told"), [(19.0, []), (21.0, [0.21])])
def test_waiting_for_data(wait, told):
    assert shares(doctor._data(profile(phases={"data wait": wait, "forward": 100.0 - wait}), job())) == told


@pytest.mark.parametrize(("lost", "told"), [(19.0, []), (21.0, [0.21])])
def test_waiting_for_ranks(lost, told):
    assert shares(doctor._ranks(profile(phases={"communication": lost, "forward": 100.0 - lost}), job(), 2)) == told


@pytest.mark.parametrize(("seconds", "every", "told"), [(1.0, None, []), (1.2, None, [0.107]), (0.2, 25, []), (0.3, 25, [0.130])])
def test_saving(seconds, every, told):
    """One save at the end of an epoch, and one every so many updates."""
    assert shares(doctor._saving(profile(saving_s=seconds), every)) == told


def test_the_remedies_of_saving_are_named():
    (at_ends,), (often,) = (list(doctor._saving(profile(saving_s=2.0), every)) for every in (None, 25))
    assert at_ends.overrides == ("saving.asynchronous=true",)
    assert at_ends.evidence.startswith("1 checkpoint an epoch")
    assert often.overrides == ("saving.every_updates=null saving.every_minutes=10", "saving.asynchronous=true")


@pytest.mark.parametrize(("seconds", "every", "told"), [(2.4, 1, []), (2.6, 1, [0.206]), (4.8, 2, []), (5.2, 2, [0.206])])
def test_evaluation(seconds, every, told):
    assert shares(doctor._evaluation(profile(evaluation_s=seconds), every)) == told


def told(*lines: Line, device: str = "cpu") -> list[tuple[str, float]]:
    return [(p.name, pytest.approx(p.share)) for p in doctor._lines(profile(lines=list(lines), device=device))]


def test_lines():
    assert told(Line("a.py:1 in f", share=0.09)) == []
    assert told(Line("a.py:1 in f", share=0.11)) == [("line", 0.11)]
    assert told(Line("a.py:1 in f", share=0.04, small_operations=99)) == []
    assert told(Line("a.py:1 in f", share=0.06, small_operations=63)) == []
    assert told(Line("a.py:1 in f", share=0.06, small_operations=64)) == [("loop", 0.06)]
    assert told(Line("a.py:1 in f", share=0.06, created=0.9)) == [("created", 0.06)]
    assert told(Line("a.py:1 in f", share=0.06, created=0.5)) == []
    assert told(Line("a.py:1 in f", share=0.06), Line("a.py:2 in f", share=0.03)) == []
    assert told(Line("a.py:1 in f", share=0.06), Line("a.py:2 in f", share=0.06)) == [("lines", 0.12)]


def test_a_value_that_is_read_back_costs_its_line_on_a_device_alone():
    line = Line("a.py:1 in f", share=0.08, host_reads=1)
    assert told(line) == [("sync", doctor.HOST_READ_SHARE)]
    assert told(line, device="cuda") == [("sync", 0.08)]


@pytest.mark.parametrize(("share", "told"), [(0.09, []), (0.11, [0.11])])
def test_threads(share, told):
    assert shares(doctor._threads(profile(threads=Threads(1, 2, share)))) == told
    assert list(doctor._threads(profile())) == []


@pytest.mark.parametrize(("gain", "told"), [(1.4, []), (2.0, [0.25]), (4.0, [0.375])])
def test_a_batch_that_does_not_fill_the_device(gain, told):
    assert shares(doctor._batch(profile(larger_batch=gain), job())) == told
