"""A process of its own that works and answers."""

import os
import signal
import threading

import pytest

from drivetrain.core.child import Died, NoAnswer, answer_of
from drivetrain.core.errors import UserError
from drivetrain.core.forking import ForkedProcess
from drivetrain.core.signals import ended_by_signals


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
    with pytest.raises(NoAnswer, match="it hangs: it took longer than 0 minutes and was ended"):
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
