"""Bits that flip and ends that are lost, in every file of a run: `bench.flips`, a short form of it and the whole."""

from __future__ import annotations

import shutil

import pytest
from bench import flips


@pytest.fixture
def copies(small, tmp_path):
    return {kind: run.moved(shutil.copytree(run.run_dir, tmp_path / kind)) for kind, run in small.items()}


@pytest.mark.parametrize("count", [36, pytest.param(flips.CASES, marks=pytest.mark.slow)])
def test_no_damage_changes_what_a_resumed_run_computes(copies, count):
    cases = flips.campaign(copies, count, seed=1)
    assert [case for case in cases if case.outcome not in flips.ALLOWED] == []
    of_checkpoints = {case.outcome for case in cases if "/checkpoints/" in case.file}
    assert of_checkpoints == {flips.REJECTED}, "every bit of a checkpoint counts"
    assert len({case.file for case in cases}) == min(count, 63)


@pytest.mark.parametrize(
    "file", ["pictures/trackers.json", "pictures/averages/2.safetensors", "table/table.json", "texts/tokenizer.json"]
)
def test_every_bit_of_what_a_run_keeps_beside_its_checkpoints_counts(copies, file):
    kind, _, name = file.partition("/")
    whole, content = flips.Whole(copies[kind]), (copies[kind].run_dir / name).read_bytes()
    for place in (0, len(content) // 2, len(content) - 1):
        flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        assert flips.judge(whole, name, flipped)[0] == flips.REJECTED
    assert flips.judge(whole, name, content)[0] == flips.SAME


def test_a_damage_that_is_not_seen_is_counted(copies, monkeypatch):
    monkeypatch.setattr("drivetrain.saving.manifest.verify", lambda checkpoint: None)
    cases = flips.campaign({"pictures": copies["pictures"]}, 21, seed=1)
    assert any(case.outcome == flips.EFFECT for case in cases if case.file.startswith("pictures/checkpoints/4"))
