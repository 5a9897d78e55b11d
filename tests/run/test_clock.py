"""The clock of the machine is set while a run trains: times go on, and durations are never negative."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import drivetrain
from drivetrain.core import process
from drivetrain.sweeps.store import Entry

PACKAGE = Path(drivetrain.__file__).parent
DATES = {"core/process.py", "run/environment.py", "compile/kernel_cache.py"}  # that read the date, and take no duration from it


def test_setting_the_clock_back_moves_neither_records_nor_durations(monkeypatch, train):
    real = time.time
    calls = []

    def jumping() -> float:  # a day back, from the first record on
        calls.append(1)
        return real() - 86_400 * (len(calls) > 1)

    monkeypatch.setattr(time, "time", jumping)
    before = process.now()
    result = train("updates=2")
    assert 0 < result.time_to_first_step_s <= result.wall_s < 600
    assert before <= process.now() < before + 600


def test_durations_come_from_the_monotonic_clock():
    users = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if "time.time()" in p.read_text(encoding="utf-8")}
    assert users <= DATES, "a duration is time.monotonic()'s, a record's time is core.process.now()'s"


def test_a_job_of_a_sweep_whose_folder_is_gone_has_a_result(tmp_path):
    entry = Entry(0, SimpleNamespace(overrides=[], problems=[], job=None), tmp_path / "moved" / "0")  # type: ignore[arg-type]
    entry.close(1, "it was lost")
    assert entry.load_result(("failed",))
    (tmp_path / "file").write_text("")
    Entry(1, entry.job, tmp_path / "file" / "1").close(1, "nowhere to write to")
