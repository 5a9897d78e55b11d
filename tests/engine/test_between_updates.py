"""A run that is told to stop while it waits for data: what it has is saved, and a resumed run ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.core import signals
from drivetrain.core.signals import StopFlag
from drivetrain.core.tensors import Tensors

RUN = ["data=digits", "batch.global_batch=128", "model.dropout=0.2", "updates=9", "epochs=2", "log_every=3", "evaluate_every=2"]
STOPPED = r"stopped by a signal while .* delivered nothing, of a batch that begins with sample \d+: go on with resume="
fetch = Tensors.fetch


@pytest.fixture
def stuck(monkeypatch, tmp_path):
    """`stuck(number)`: the read of this number tells the run to end, and then lasts too long."""

    def at(number: int, told: signal.Signals = signal.SIGTERM) -> None:
        def read(self, indices):
            with (tmp_path / "reads").open("a") as reads:
                reads.write("x")
            if (tmp_path / "reads").stat().st_size < number:
                return fetch(self, indices)
            os.kill(os.getpid() if torch.utils.data.get_worker_info() is None else os.getppid(), told)
            ends = time.monotonic() + 2
            while time.monotonic() < ends:
                time.sleep(0.01)
            return fetch(self, indices)

        monkeypatch.setattr(Tensors, "fetch", read)

    monkeypatch.setattr(signals, "SOON_S", 0.01)
    monkeypatch.setattr(signals, "NUDGE_S", 0.01)
    return at


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["loader=sync"], signal.SIGTERM),
        (["loader=threads", "loader.num_threads=1", "loader.prefetch_factor=1"], signal.SIGINT),
        (["loader=workers", "loader.num_workers=1", "loader.prefetch_factor=1", "loader.timeout_s=0"], signal.SIGTERM),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value.name,
)
def test_it_saves_between_updates_and_goes_on_with_the_same_bits(tiny, stuck, monkeypatch, tmp_path, words, told):
    whole = drivetrain.train(tiny(*RUN))
    stuck(6 if words == ["loader=sync"] else 7, told)  # read in the first epoch, or ahead of it
    stopped = drivetrain.train(tiny(*RUN, *words))
    assert stopped.status == "interrupted", stopped.error
    saved = [int(path.name) for path in (Path(stopped.run_dir) / "checkpoints").iterdir()]
    assert stopped.updates == max(saved) > 0
    monkeypatch.setattr(Tensors, "fetch", fetch)
    again = drivetrain.train([f"resume={stopped.run_dir}"])
    ends = [Path(run.run_dir) / "checkpoints/9/model.safetensors" for run in (whole, again)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_wait_between_updates_is_ended_and_says_so(tiny, stuck):
    stuck(4)
    stopped = drivetrain.train(tiny(*RUN))
    assert re.match(STOPPED, stopped.error), stopped.error
    assert [path.name for path in (Path(stopped.run_dir) / "checkpoints").iterdir()] == [str(stopped.updates)]


def test_in_the_middle_of_an_update_nothing_can_be_saved(tiny, stuck, monkeypatch):
    """The random numbers of half an update are drawn: it ends later, for the last checkpoint."""
    monkeypatch.setattr(signals, "STOP_WAIT_S", 0.3)
    stuck(6)
    stopped = drivetrain.train(tiny(*RUN, "batch=accumulate", "batch.accumulation_steps=2"))
    assert (stopped.status, stopped.updates) == ("interrupted", 2), stopped.error
    assert not (Path(stopped.run_dir) / "checkpoints").exists()


def test_an_update_that_lasts_longer_than_any_wait_is_finished_and_saved(tiny, monkeypatch):
    """Each read takes six seconds of ten, and the signal comes at the second one of an update of four."""
    clock, reads = time.monotonic, []

    def read(self, indices):
        reads.append(indices)
        if len(reads) == 6:
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signals.NUDGE)
        return fetch(self, indices)

    monkeypatch.setattr(Tensors, "fetch", read)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + len(reads) * 0.6 * signals.STOP_WAIT_S)
    stopped = drivetrain.train(tiny(*RUN, "loader=sync", "batch=accumulate", "batch.accumulation_steps=4"))
    assert stopped.error.startswith("stopped by a signal at update 2: go on with resume=")
    assert [path.name for path in (Path(stopped.run_dir) / "checkpoints").iterdir()] == ["2"]
    assert len(reads) == 8


def test_a_process_that_was_not_told_to_stop_reads_on():
    with StopFlag() as flag:
        StopFlag.can_save_now(True)
        with StopFlag.ends_reads():
            signal.raise_signal(signals.NUDGE)
        assert not flag.raised
