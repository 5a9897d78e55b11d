"""Signals that stop the process which starts the ranks.

torch's launcher raises an exception in the handler, wherever the process is. Python drops one that is raised in a fork hook or
a destructor, and logging catches one that is raised while it writes a line: the signal would be lost, with a traceback.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from drivetrain.core.signals import STOP_SIGNALS

AGAIN_S = 0.05  # until a signal that came at a bad moment is raised again
DROPPING = ("logging", "multiprocessing.popen_fork", "weakref")  # modules in which an exception would be dropped
LEFT_TO_TORCH = "SIGQUIT"  # torch sets handlers for at least one signal: for one that no scheduler sends


@contextmanager
def raised_as_torch_does() -> Iterator[None]:
    """Within the context a stop signal raises torch's SignalException, which ends the ranks, where it is not dropped.

    A rank that was forked just now has this handler too. There the signal waits until the rank has its own.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    here = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != here or _drops_exceptions(frame):
            _thread.start_new_thread(_raise_again, (number,))  # threading.Thread takes locks, which this thread may hold already
            return
        raise SignalException(f"stopped by {signal.Signals(number).name}", sigval=signal.Signals(number))

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_again(number: int) -> None:
    time.sleep(AGAIN_S)
    signal.pthread_kill(threading.main_thread().ident or 0, number)  # it ends the main thread's waiting call


def _drops_exceptions(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_globals.get("__name__") in DROPPING:
            return True
        frame = frame.f_back
    return False
