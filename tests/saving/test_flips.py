"""Bits that flip and ends that are lost, in every file of a run: `bench.flips`, a short form of it and the whole."""

from __future__ import annotations

import shutil

import pytest
from bench import flips


@pytest.mark.parametrize("count", [60, pytest.param(flips.CASES, marks=pytest.mark.slow)])
def test_no_damage_changes_what_a_resumed_run_computes(once, tmp_path, count):
    cases = flips.campaign(shutil.copytree(once, tmp_path / "run"), count, seed=1)
    assert [case for case in cases if case.outcome not in flips.ALLOWED] == []
    of_checkpoints = {case.outcome for case in cases if case.file.startswith("checkpoints/")}
    assert of_checkpoints == {flips.REJECTED}, "every bit of a checkpoint counts"
    assert len({case.file for case in cases}) >= 12


def test_a_damage_that_is_not_seen_is_counted(once, tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.saving.manifest.verify", lambda checkpoint: None)
    cases = flips.campaign(shutil.copytree(once, tmp_path / "run"), 16, seed=1)
    assert any(case.outcome == flips.EFFECT for case in cases if case.file.startswith("checkpoints/4"))
