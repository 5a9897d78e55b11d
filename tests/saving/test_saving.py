"""When states are saved, and which are kept."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from drivetrain import saving
from drivetrain.core.progress import Progress
from drivetrain.parallel.base import Parallel
from drivetrain.saving import checkpoint_io
from drivetrain.saving.options import Last
from drivetrain.saving.writer import Writer
from tests.saving.test_host_copy import stub
from tests.support.waiting import LIMIT_S


def saved(run_dir: Path) -> list[int]:
    root = run_dir / "checkpoints"
    return sorted(int(p.name) for p in root.iterdir()) if root.is_dir() else []


EPOCHS = ["updates=null", "epochs=4"]  # of four updates each


def test_last_keeps_the_newest_epochs(make, tmp_path):
    make(*EPOCHS, "saving.keep=2").fit()
    assert saved(tmp_path / "run") == [12, 16]


def test_none_saves_nothing(make, tmp_path):
    trainer = make(*EPOCHS, "saving=none")
    trainer.fit()
    assert trainer.progress.updates == 16
    assert not (tmp_path / "run").exists()


def test_every_so_many_updates_and_at_the_end_of_each_epoch(make, tmp_path):
    make("data.samples=120", "updates=null", "epochs=2", "saving.every_updates=4", "saving.keep=50").fit()
    assert saved(tmp_path / "run") == [4, 8, 10, 14, 18, 20]  # ten updates an epoch; counted from the last save


def test_the_end_of_a_run_in_the_middle_of_an_epoch_is_saved(make, tmp_path):
    make("data.samples=120", "updates=7", "saving.every_updates=3", "saving.keep=50").fit()
    assert saved(tmp_path / "run") == [3, 6, 7]


def test_every_so_many_minutes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    last = saving.Last(every_minutes=2.0)
    last.restart(0)
    assert not last.due(50)
    now[0] += 119
    assert not last.due(60)
    now[0] += 2
    assert last.due(61)
    last.restart(61)
    assert not last.due(62)


def test_the_sooner_of_the_two_counts(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    last = saving.Last(every_updates=10, every_minutes=1.0)
    last.restart(5)
    assert not last.due(14)
    assert last.due(15)
    now[0] += 61
    assert last.due(6)


def test_best_keeps_the_best_evaluation_beside_the_newest(make, tmp_path, monkeypatch):
    accuracies = iter([0.25, 0.75, 0.5, 0.5])
    trainer = make(*EPOCHS, "saving=best", "saving.keep=1")
    monkeypatch.setattr(type(trainer.evaluator), "evaluate", lambda self, stops: {"loss": 1.0, "accuracy": next(accuracies)})
    kept = []
    save = trainer.save
    trainer.save = lambda: (save(), kept.append(saved(tmp_path / "run")))
    trainer.fit()
    assert kept == [[4], [8], [8, 12], [8, 16]]
    assert trainer.progress.best == {"loss": 1.0, "accuracy": 0.75, "update": 8}
    assert trainer.progress.final["accuracy"] == 0.5


def test_of_equals_the_first_stays_the_best(make, monkeypatch):
    trainer = make(*EPOCHS, "saving=best")
    monkeypatch.setattr(type(trainer.evaluator), "evaluate", lambda self, stops: {"loss": 1.0, "accuracy": 0.5})
    trainer.fit()
    assert trainer.progress.best["update"] == 4


def test_an_off_switch_that_is_asked_says_no():
    off = saving.Saving()
    off.restart(0)
    assert not off.active
    assert not off.due(10**9)


def test_what_cannot_be_is_refused(problems):
    assert any("saving=best picks by evaluations" in p for p in problems("saving=best", "evaluate_every=20", "epochs=10"))
    for word in ("saving.keep=0", "saving.every_updates=0", "saving.every_minutes=0"):
        assert any(p.startswith(word) for p in problems(word))


@pytest.mark.parametrize("option", ["last", "best"])
def test_each_state_is_saved_once(make, monkeypatch, option):
    from drivetrain.saving import checkpoint_io

    writes, save = [], checkpoint_io.save
    monkeypatch.setattr(
        checkpoint_io, "save", lambda run_dir, update, *rest: writes.append(update) or save(run_dir, update, *rest)
    )
    make(*EPOCHS, f"saving={option}", "saving.every_updates=2").fit()
    assert writes == sorted(set(writes))
    assert len(writes) == 8


def test_the_umask_says_who_can_read_a_checkpoint(tmp_path):
    before = os.umask(0o027)
    try:
        folder = checkpoint_io.save(tmp_path, 1, {"a": torch.zeros(2)}, {})
        checkpoint_io.write_weights({"a": torch.zeros(2)}, tmp_path / "averaged.safetensors")
    finally:
        os.umask(before)
    files = [*folder.iterdir(), tmp_path / "averaged.safetensors"]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: "0o640" for path in files}


# --- asynchronous saving: the state of the save is written while training goes on, one write after the other ---


@pytest.fixture
def held(monkeypatch) -> tuple[threading.Event, threading.Event, list[str]]:
    """Writes wait for a word: (a write has begun, it may go on, what happened)."""
    begun, go_on, calls = threading.Event(), threading.Event(), []
    save = checkpoint_io.save

    def waits(run_dir, update, *rest):
        calls.append(f"begins {update}")
        begun.set()
        assert go_on.wait(LIMIT_S)
        save(run_dir, update, *rest)
        calls.append(f"ends {update}")

    monkeypatch.setattr(checkpoint_io, "save", waits)
    return begun, go_on, calls


def test_what_is_written_is_a_copy_of_the_save(tmp_path, held):
    """The optimizer changes weights in place, and its own state, while the thread has written nothing yet."""
    begun, go_on, _ = held
    writer, progress = Writer(tmp_path, Last(asynchronous=True), Parallel(), contextlib.nullcontext), Progress(updates=1)
    weights, moment = torch.zeros(3), torch.zeros(3)
    trainer = stub(weights, progress)
    trainer.state().update(optimizer={"moment": moment})
    writer.save(trainer)
    assert begun.wait(LIMIT_S), "the loop goes on while the write has not ended"
    weights.add_(1)
    moment.add_(1)
    go_on.set()
    writer.wait()
    assert safetensors.torch.load_file(tmp_path / "checkpoints/1/model.safetensors")["w"].tolist() == [0, 0, 0]
    assert checkpoint_io.load(tmp_path / "checkpoints/1")[1]["optimizer"]["moment"].tolist() == [0, 0, 0]


def test_a_save_waits_for_the_write_before(tmp_path, held):
    begun, go_on, calls = held
    writer, progress = Writer(tmp_path, Last(asynchronous=True), Parallel(), contextlib.nullcontext), Progress(updates=1)
    writer.save(stub(torch.zeros(3), progress))
    assert begun.wait(LIMIT_S)
    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        calls.append(f"waits for {thread.name}")
        go_on.set()
        join(thread, timeout)

    threading.Thread.join = joined  # type: ignore[method-assign]
    try:
        progress.updates = 2
        writer.save(stub(torch.ones(3), progress))
    finally:
        threading.Thread.join = join  # type: ignore[method-assign]
    writer.wait()
    assert calls == ["begins 1", "waits for saving", "ends 1", "begins 2", "ends 2"]
    assert safetensors.torch.load_file(tmp_path / "checkpoints/2/model.safetensors")["w"].tolist() == [1, 1, 1]


def test_an_error_of_a_write_is_raised_by_the_next_save(tmp_path, monkeypatch):
    def refuses(*_: object) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(checkpoint_io, "save", refuses)
    writer = Writer(tmp_path, Last(asynchronous=True), Parallel(), contextlib.nullcontext)
    writer.save(stub(torch.zeros(3), Progress(updates=1)))
    with pytest.raises(RuntimeError, match="refused"):
        writer.save(stub(torch.zeros(3), Progress(updates=2)))
