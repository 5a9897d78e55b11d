"""Bits that flip and ends that are lost, in every file of a run: nothing that a resumed run computes changes.

A damage is rejected (also where the checkpoint is passed over for the one before), or has no effect: the resumed run has the same
config, starts from the same bytes and goes on with the same runs of trackers, and the model predicts the same. Figures that
`report` shows may differ: logs and results are not signed. What belongs to the machine (paths, devices, loggers) is not compared:
where its record is not signed any more, the command line's settings hold, as for a stranger's run.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.core.errors import UserError
from drivetrain.launch import launcher
from drivetrain.run import identity, reader
from drivetrain.saving import manifest
from tests.support import odd
from tests.support.small_runs import SmallRun

REJECTED, SAME, FIGURES, EFFECT = "rejected", "no effect", "figures", "effect"


class Whole:
    """A run as it was before any damage, and what readers take from it."""

    def __init__(self, run: SmallRun) -> None:
        self.run = run
        self._config: Any = None
        self.used, self.shown = self.read("")

    def judge(self, file: str, content: bytes) -> str:
        """Damage one file, read the run, and put the file back."""
        path = self.run.run_dir / file
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            if any(manifest.verify(each) is not None for each in manifest.checkpoints(self.run.run_dir)):
                return REJECTED
            used, shown = self.read(file)
        except UserError:
            return REJECTED
        finally:
            path.write_bytes(before)
        return EFFECT if used != self.used else SAME if shown == self.shown else FIGURES

    def read(self, damaged: str) -> tuple[Any, str]:
        """What a resumed run and a prediction use, and what a report shows. A damaged checkpoint changes no config."""
        run_dir, of_checkpoint = self.run.run_dir, damaged.startswith("checkpoints/")
        config = self._config
        if config is None or not of_checkpoint:
            job = launcher.prepare([f"resume={run_dir}"])
            config = job.config_hash, str(identity.without_machine_local(job.composed, job.not_compared))
            self._config = self._config or config
        found, _ = manifest.newest_valid(run_dir)
        start = None if found is None else (found.name, [(f.name, manifest.sha256(f)) for f in sorted(found.iterdir())])
        used = (config, start, self.run.trackers(), self.run.predictions())
        return used, "" if of_checkpoint else repr(reader.read(run_dir))


@pytest.fixture
def wholes(small: dict[str, SmallRun], tmp_path: Path) -> dict[str, Whole]:
    return {kind: Whole(run.moved(shutil.copytree(run.run_dir, tmp_path / kind))) for kind, run in small.items()}


@st.composite
def damages(draw: st.DrawFn, wholes: dict[str, Whole]) -> tuple[str, str, bytes]:
    """A kind of run, one of its files, and its bytes with one bit flipped or their end cut off."""
    kind = draw(st.sampled_from(sorted(wholes)))
    run_dir = wholes[kind].run.run_dir
    file = draw(st.sampled_from(sorted(file for file in run_dir.rglob("*") if file.is_file() and file.stat().st_size)))
    content = bytearray(file.read_bytes())
    place = draw(st.integers(0, len(content) - 1))
    if draw(st.integers(0, 4)) == 0:
        return kind, str(file.relative_to(run_dir)), bytes(content[:place])
    content[place] ^= 1 << draw(st.integers(0, 7))
    return kind, str(file.relative_to(run_dir)), bytes(content)


@odd.fuzz
def test_no_damage_changes_what_a_resumed_run_computes(wholes: dict[str, Whole]) -> None:
    @given(damages(wholes))
    def each(damage: tuple[str, str, bytes]) -> None:
        kind, file, content = damage
        outcome = wholes[kind].judge(file, content)
        assert outcome != EFFECT
        assert outcome == REJECTED or not file.startswith("checkpoints/"), "every bit of a checkpoint counts"

    each()


@pytest.mark.parametrize(
    "file", ["pictures/trackers.json", "pictures/averages/2.safetensors", "table/table.json", "texts/tokenizer.json"]
)
def test_every_bit_of_what_a_run_keeps_beside_its_checkpoints_counts(wholes: dict[str, Whole], file: str) -> None:
    kind, _, name = file.partition("/")
    content = (wholes[kind].run.run_dir / name).read_bytes()
    for place in (0, len(content) // 2, len(content) - 1):
        flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        assert wholes[kind].judge(name, flipped) == REJECTED
    assert wholes[kind].judge(name, content) == SAME


def test_a_damage_that_is_not_seen_is_an_effect(wholes: dict[str, Whole], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.saving.manifest.verify", lambda checkpoint: None)
    file = wholes["pictures"].run.run_dir / "checkpoints/4/state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    assert wholes["pictures"].judge("checkpoints/4/state.pt", bytes(content)) == EFFECT
