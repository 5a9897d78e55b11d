"""A process that is forked where torch has computed can compute too."""

import multiprocessing
import os
import signal
import sys
import threading

import pytest
import torch

from drivetrain.core.forking import ForkedProcess


def compute() -> None:
    torch.nn.Linear(300, 300)(torch.randn(300, 300)).sum().backward()
    torch.randn(1_000_000).exp_()


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    compute()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_a_forked_process_computes_after_this_one_has():
    process = ForkedProcess(target=compute)
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0


def test_a_forked_process_takes_signals():
    def answer(connection) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
        connection.send(threading.current_thread() is threading.main_thread())
        signal.pause()

    ours, theirs = multiprocessing.Pipe()
    process = ForkedProcess(target=answer, args=(theirs,))
    process.start()
    assert ours.recv()
    os.kill(process.pid, signal.SIGUSR1)
    process.join(60)
    assert process.exitcode == 7


def test_what_keeps_it_from_forking_is_raised(monkeypatch):
    def refused() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("os.fork", refused)
    with pytest.raises(BlockingIOError, match="no more processes"):
        ForkedProcess(target=compute).start()
