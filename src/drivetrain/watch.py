"""Signs of life: each rank gives one a second, and a rank that gives none for too long is named, with its stack, and ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

EVERY_S = 1.0
ABANDONED_S = 12.0
STACK = signal.SIGUSR2  # asks a rank for its Python stack


def alive(folder: Path, rank: int) -> None:
    """Begin this rank's signs of life: a thread that touches ranks/<rank>.alive, which holds the process's number."""
    file = folder / f"{rank}.alive"
    file.write_text(str(os.getpid()))
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.register(STACK, stack, all_threads=True)

    def touch() -> None:
        while True:
            time.sleep(EVERY_S)
            with contextlib.suppress(OSError):  # a full disk is the run's to complain of
                os.utime(file)

    threading.Thread(target=touch, name="signs of life", daemon=True).start()


class Watch:
    """Looks at the ranks of this machine until it is left; `lost` says of those that it ended why.

    `abandoned` is called, in another thread, when all ranks have ended and nobody has noticed for `ABANDONED_S`: the
    launcher waits for a machine that cannot be reached any more.
    """

    def __init__(self, folder: Path, silent_s: float) -> None:
        self.lost: dict[int, str] = {}
        self.abandoned: Callable[[], None] | None = None
        self._folder, self._silent_s = folder, silent_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        ended_since: float | None = None
        while not self._over.wait(EVERY_S):
            ended_since = (ended_since or time.monotonic()) if self._all_ended() else None
            if self.abandoned is not None and ended_since is not None and time.monotonic() > ended_since + ABANDONED_S:
                self.abandoned()
            for file in self._folder.glob("*.alive"):
                with contextlib.suppress(OSError, ValueError):
                    silent = time.time() - file.stat().st_mtime
                    if silent > self._silent_s:
                        self._end(int(file.stem), int(file.read_text()), silent, file)

    def _all_ended(self) -> bool:
        begun = list(self._folder.glob("*.alive"))
        return bool(begun) and all(file.with_suffix(".json").exists() for file in begun)

    def _end(self, rank: int, process: int, silent: float, file: Path) -> None:
        state = _state(process)
        file.unlink()  # once
        if state is None or state == "Z":  # gone already: the launcher knows
            return
        stack = self._folder / f"{rank}.stack"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, STACK)
            os.kill(process, signal.SIGCONT)  # a stopped process answers when it goes on
            until = time.monotonic() + 2
            while not stack.stat().st_size and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(process, signal.SIGKILL)
        how = {"T": "stopped (SIGSTOP)", "D": "waiting for a disk or device"}.get(state, "stuck")
        where = f"; where it was: {stack}" if stack.stat().st_size else ""
        self.lost[rank] = f"rank {rank} gave no sign of life for {silent:.0f} s ({how}), and was ended{where}"


def _state(process: int) -> str | None:
    """One letter of the process's state; None where it is gone, or where the system does not tell."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
