"""Odd run directories and checkpoints: a short form of `bench.fuzz`, on the run that flips damage too; and what it found."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench.fuzz import checkpoints, runs
from bench.fuzz.judged import DEFECT, judged
from bench.small_runs import SmallRun

import drivetrain
from drivetrain.core import sealed
from drivetrain.core.errors import UserError
from drivetrain.launch import launcher
from drivetrain.measure.claims import diff
from drivetrain.run import records
from drivetrain.saving import manifest


@pytest.mark.parametrize("kind", [runs, checkpoints])
def test_odd_files_are_read_or_refused(kind: ModuleType, small: dict[str, SmallRun], tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    ended = [judged(example) for example in kind.examples(tmp_path / "place", 25, seed=7, trained=small)]
    assert [each for each in ended if each.outcome == DEFECT] == []
    assert len({each.outcome for each in ended}) == 2


@pytest.fixture
def run(once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(once, tmp_path / "run")


def test_the_recipe_of_a_run_is_not_a_link(run: Path, tmp_path: Path) -> None:
    """What it leads to would be quoted in messages."""
    (run / "recipe.yaml").rename(tmp_path / "elsewhere.yaml")
    (run / "recipe.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    with pytest.raises(UserError, match="it is a link"):
        launcher.prepare([f"resume={run}"])
    with pytest.raises(UserError, match="it is a link"):
        diff.command([str(run), "fast"])


def test_versions_that_are_none_are_left_out(run: Path) -> None:
    content = json.loads((run / "environment.json").read_text())
    content |= {"versions": {"torch": {"a": 1}}, "git_commit": ["x"]}
    (run / "environment.json").write_text(json.dumps(content))
    assert diff.command([str(run), str(run)]) == 0


def test_zeros_in_place_of_records_are_read_for_a_while_only(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"update": 1}\n')
    os.truncate(file, 2**40)
    assert records.read(file).records == [{"update": 1}]


OF_OTHER_TYPES: list[dict[str, object]] = [
    {"bytes": "x"}, {"bytes": {"state.pt": "x"}}, {"sha256": None}, {"sha256": {"state.pt": 1}}, {"about": []},
    {"sha256": {"\0": "x"}}, {"sha256": {"\udc80": "x"}},
]  # fmt: skip


@pytest.mark.parametrize("change", OF_OTHER_TYPES)
def test_a_manifest_of_other_types_is_none(run: Path, change: dict[str, object]) -> None:
    checkpoint = run / "checkpoints" / "4"
    content = {k: v for k, v in manifest.read(checkpoint).items() if k != "own_sha256"} | change
    (checkpoint / "manifest.json").write_text(sealed.text(content))
    assert isinstance(manifest.verify(checkpoint), str)


def test_a_checkpoint_that_nobody_can_restore_is_told_in_words(run: Path) -> None:
    for update in ("2", "4"):
        torch.save({"nothing": 1}, run / "checkpoints" / update / "state.pt")
        checkpoints.sign(run / "checkpoints" / update)
    result = drivetrain.train([f"resume={run}", "updates=6"])
    assert result.status == "failed"
    assert "checkpoints/4 cannot be restored (KeyError: " in str(result.error)
