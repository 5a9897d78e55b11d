"""A process that is forked where torch has computed can compute too."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch

from drivetrain.core.forking import ForkedProcess
from drivetrain.sweep.forked import _terminate_with_parent


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


def test_a_forked_process_that_asks_for_it_is_told_when_its_parent_ends():
    """And not before: the system means the thread that forked it."""

    def watch(connection) -> None:
        _terminate_with_parent()
        connection.send("watching")
        time.sleep(0.5)
        os._exit(3)

    ours, theirs = multiprocessing.Pipe()
    process = ForkedProcess(target=watch, args=(theirs,))
    process.start()
    assert ours.recv() == "watching"
    process.join(60)
    assert process.exitcode == 3


@pytest.mark.parametrize("blocked", [True, False])
def test_a_forked_process_starts_with_the_signals_blocked_that_the_caller_blocks(blocked):
    before = signal.pthread_sigmask(signal.SIG_BLOCK if blocked else signal.SIG_UNBLOCK, [signal.SIGUSR2])
    ours, theirs = multiprocessing.Pipe()
    process = ForkedProcess(target=lambda: theirs.send(signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert ours.recv() is blocked
    process.join(60)


def test_a_forked_process_forks():
    def parent() -> None:
        child = ForkedProcess(target=compute)
        child.start()
        child.join(60)
        os._exit(5 if child.exitcode == 0 else 6)

    process = ForkedProcess(target=parent)
    process.start()
    process.join(60)
    assert process.exitcode == 5
