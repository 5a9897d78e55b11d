"""A run's directory that is moved away or removed while the run trains."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import drivetrain
from drivetrain.core.errors import CannotSave
from drivetrain.core.progress import Progress
from drivetrain.parallel.base import Parallel
from drivetrain.run.held import Held
from drivetrain.saving import manifest
from drivetrain.saving.options import Last
from drivetrain.saving.writer import Writer
from tests.saving.test_host_copy import stub


def test_a_directory_is_found_where_it_went(tmp_path):
    (tmp_path / "run").mkdir()
    held = Held(tmp_path / "run")
    assert held.folder() == held.place() == tmp_path / "run"
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert held.folder() == held.place() == tmp_path / "elsewhere"
    (tmp_path / "run").mkdir()  # another one of its name
    assert held.folder() == tmp_path / "elsewhere"
    (tmp_path / "elsewhere").rmdir()
    assert held.folder() is None
    assert held.place() == tmp_path / "run-rescued"
    assert held.place().is_dir()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_first_save_after_a_move_is_in_the_new_place_and_the_last_one(tmp_path, asynchronous):
    run, gone = tmp_path / "run", tmp_path / "gone"
    writer = Writer(run, Last(asynchronous=asynchronous), Parallel(), contextlib.nullcontext)
    writer.start()
    progress = Progress(updates=1)
    writer.save(stub(torch.zeros(2), progress))
    writer.wait()
    run.rename(gone)
    progress.updates = 2
    with pytest.raises(CannotSave, match=f"moved to {gone} while the run trained: .*{gone}/checkpoints/2, .*resume={gone}"):
        writer.save(stub(torch.ones(2), progress))
    assert not run.exists()
    assert manifest.newest_valid(gone) == (gone / "checkpoints/2", [])
    saved = safetensors.torch.load_file(gone / "checkpoints/2/model.safetensors")
    assert torch.equal(saved["w"], torch.ones(2))


def lose(monkeypatch: pytest.MonkeyPatch, how) -> None:
    """Do this to a run's directory after its first save."""
    save, done = Writer.save, []

    def saved(self: Writer, trainer) -> None:
        save(self, trainer)
        if not done:
            self.wait()
            done.append(how(Path(self._run_dir)))

    monkeypatch.setattr(Writer, "save", saved)


def test_a_run_whose_directory_was_moved_ends_with_its_result_there_and_goes_on(tiny, tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        lose(m, lambda run: run.rename(tmp_path / "kept"))
        ended = drivetrain.train(tiny("updates=6", "saving.every_updates=2"))
    assert (ended.status, ended.updates, ended.run_dir) == ("failed", 4, tmp_path / "kept")
    assert "was moved to" in ended.error
    assert f"go on with resume={tmp_path / 'kept'}" in ended.error
    assert (tmp_path / "kept" / "metrics.csv").is_file()
    again = drivetrain.train([f"resume={tmp_path / 'kept'}"])
    assert (again.status, again.updates) == ("completed", 6), again.error


def test_a_run_whose_directory_was_removed_is_saved_beside_it_and_goes_on(tiny, monkeypatch):
    with monkeypatch.context() as m:
        lose(m, shutil.rmtree)
        ended = drivetrain.train(tiny("updates=6", "saving.every_updates=2"))
    assert (ended.status, ended.updates) == ("failed", 4)
    assert "was removed while the run trained: its state is saved in" in ended.error
    assert ended.run_dir.name.endswith("-rescued")
    again = drivetrain.train([f"resume={ended.run_dir}"])
    assert (again.status, again.updates) == ("completed", 6), again.error
