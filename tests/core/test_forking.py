"""A process that is forked where torch has computed can compute too."""

import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.machine import forking
from drivetrain.core.machine.forking import Died, ForkedProcess, NoAnswer, answer_of
from drivetrain.core.machine.signals import ended_by_signals
from drivetrain.launch import heartbeat, launcher
from drivetrain.loader import workers
from tests.support.waiting import LIMIT_S


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


def code_of(process):
    """The exit code of a process that is started here."""
    process.start()
    process.join(LIMIT_S)
    process.kill()
    return process.exitcode


@pytest.mark.usefixtures("_two_threads")
def test_a_forked_process_computes_after_this_one_has():
    assert code_of(ForkedProcess(target=compute)) == 0


@pytest.mark.usefixtures("_two_threads")
def test_a_forked_process_forks():
    def parent() -> None:
        os._exit(5 if code_of(ForkedProcess(target=compute)) == 0 else 6)

    assert code_of(ForkedProcess(target=parent)) == 5


def test_a_forked_process_leaves_its_parents_garbage():
    """A process group of gloo waits there for its threads, for ever, when it is freed."""
    here = os.getpid()

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            if os.getpid() != here:
                os._exit(7)

    def collect() -> None:
        assert gc.isenabled()
        Made()  # what it makes itself is collected
        gc.collect()
        os._exit(5 if freed else 6)

    freed = []

    class Made(Cycle):
        def __del__(self) -> None:
            freed.append(True)

    process = ForkedProcess(target=collect)
    Cycle()
    assert code_of(process) == 5
    assert gc.isenabled()


@pytest.mark.usefixtures("_two_threads")
def test_ranks_compute_after_this_process_has(tiny):
    """As in a notebook, where torch's launcher forks."""
    launched = launcher.launch(launcher.prepare(tiny("parallel=ddp", "parallel.nproc=2", "runtime.threads=2")), quiet=True)
    assert launched.status == "completed", launched.error
    compute()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_forked_process_ends_with_the_one_that_forked_it(number):
    """A killed process can end nothing. That its child has ended shows at a pipe which only the child holds open."""
    ended, held = os.pipe()
    begun, told = os.pipe()

    def child() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.write(told, b"x")
        time.sleep(600)

    def parent() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which is the parent's alone
        ForkedProcess(target=child, parents_end=number).start()
        os.close(held)
        time.sleep(600)

    process = ForkedProcess(target=parent)
    process.start()
    os.close(held)
    assert os.read(begun, 1) == b"x"
    assert not select.select([ended], [], [], 0)[0], "it is there still"
    process.kill()
    process.join()
    assert select.select([ended], [], [], LIMIT_S)[0], "it was left behind"


def test_a_signal_while_it_forks_ends_each_of_both_in_its_own_way(monkeypatch):
    """The parent's handlers run in the parent, and the new process has none."""
    handled = []
    before = signal.signal(signal.SIGTERM, lambda *_: handled.append(os.getpid()))
    process = ForkedProcess(target=time.sleep, args=(600,))
    original = ForkedProcess._Popen

    def fork(process):
        popen = original(process)
        os.kill(popen.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not handled, "not before both know what to do"
        return popen

    monkeypatch.setattr(ForkedProcess, "_Popen", staticmethod(fork))
    code = code_of(process)
    signal.signal(signal.SIGTERM, before)
    assert code == -signal.SIGTERM
    assert handled == [os.getpid()]


def test_a_signal_in_a_destructor_is_answered_after_it():
    """Python drops what a handler raises there."""
    waited = []

    class Last:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def wait() -> None:
        Last()
        time.sleep(LIMIT_S)
        waited.append(True)

    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        wait()
    assert not waited


# --- a process of its own that works and answers ---


def test_an_answer():
    assert answer_of(lambda answer: answer({"process": os.getpid()}), "failed")["process"] != os.getpid()


def test_a_process_that_it_forks_may_answer():
    def work(answer):
        grandchild = ForkedProcess(target=answer, args=(7,))
        grandchild.start()
        grandchild.join()

    assert answer_of(work, "failed") == 7


def test_what_fails_is_told(capfd):
    def prints_and_dies(answer):
        os.write(1, b"one line\n")
        os.write(2, b"no memory is left\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def refuses(answer):
        raise UserError(["one", "two"])

    with pytest.raises(NoAnswer, match="it failed: IndexError: pop from empty list"):
        answer_of(lambda answer: [].pop(), "it failed")
    with pytest.raises(NoAnswer, match=r"it failed: .*pickle"):
        answer_of(lambda answer: answer(lambda: None), "it failed")
    with pytest.raises(Died, match=r"it failed: its process ended with code -9 \(no memory is left\)"):
        answer_of(prints_and_dies, "it failed")
    with pytest.raises(Died, match="it failed: its process ended with code 0"):
        answer_of(lambda answer: None, "it failed")
    with pytest.raises(UserError) as refused:
        answer_of(refuses, "it failed")
    assert (type(refused.value), refused.value.problems) == (UserError, ["one", "two"])
    assert capfd.readouterr() == ("", "")


def test_work_that_hangs_is_ended():
    with pytest.raises(NoAnswer, match="it hangs: it took longer than 0 s and was ended"):
        answer_of(lambda answer: signal.pause(), "it hangs", limit_s=0.0)


def test_a_signal_leaves_no_process_behind():
    """That the process has ended shows at a pipe which only it holds open."""
    ended, held = os.pipe()
    begun, told = os.pipe()

    def work(answer):
        os.write(told, b"x")
        signal.pause()

    def stop():
        os.read(begun, 1)
        os.close(held)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        answer_of(work, "failed")
    assert os.read(ended, 1) == b""


BEGINNINGS = {
    "a loader's worker": lambda _: workers._begin_worker(sys.__stderr__, 0),
    "a rank": lambda folder: heartbeat.start_heartbeat(folder, 0),
    "a trial of batch=auto": lambda _: forking.end_with_parent(),
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_process_ends_though_its_parent_was_killed_before_it_began(
    begin: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank would wait for the launcher's store, a worker for a request. A parent killed while it forks is not there later."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(forking, "LOOK_S", 0.05)
    reads, writes = fork.Pipe(duplex=False)

    def child() -> None:
        parent = forking.parent_pid()
        while os.getppid() == parent:
            time.sleep(0.01)
        begin(tmp_path)
        time.sleep(2 * LIMIT_S)

    def parent() -> None:
        fork.Process(target=child).start()
        os._exit(0)

    process = fork.Process(target=parent)
    process.start()
    process.join(LIMIT_S)
    writes.close()
    assert reads.poll(LIMIT_S)
    with pytest.raises(EOFError):  # all that had the other end have ended
        reads.recv()
