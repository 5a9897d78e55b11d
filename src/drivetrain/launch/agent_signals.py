"""Signals that stop the process which starts the ranks.

torch's launcher raises an exception in the handler, wherever the process is, also where it would be dropped: the signal would be
lost, with a traceback.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from drivetrain.core.signals import comes_again, handled_by

LEFT_TO_TORCH = "SIGQUIT"  # torch sets handlers for at least one signal: for one that no scheduler sends


@contextmanager
def raised_as_torch_does() -> Iterator[None]:
    """Within the context a stop signal raises torch's SignalException, which ends the ranks, where it is not dropped.

    A rank that was forked just now has this handler too. There the signal waits until the rank has its own.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    here = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if not comes_again(number, frame, here):
            raise SignalException(f"stopped by {signal.Signals(number).name}", sigval=signal.Signals(number))

    with handled_by(handle):
        yield
