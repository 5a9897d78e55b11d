"""Asynchronous saving: the state of the save is written while training goes on, one write after the other."""

from __future__ import annotations

import contextlib
import threading

import pytest
import safetensors.torch
import torch

from drivetrain.core.progress import Progress
from drivetrain.parallel.base import Parallel
from drivetrain.saving import checkpoint_io
from drivetrain.saving.options import Last
from drivetrain.saving.writer import Writer
from tests.saving.test_host_copy import stub
from tests.support.waiting import LIMIT_S


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
