"""Signs of life: each rank gives one a second, and a rank that gives none for too long is named, with its stack, and ended."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.core.errors import is_of_others

EVERY_S = 1.0
ABANDONED_S = 12.0
RESTARTING_S = 75.0  # the same while ranks may start again: those of other machines have a last checkpoint to write
SPEAKERS = ("torch.distributed.elastic", "torch.multiprocessing")
STOPPED = ("T", "t")  # by a signal, by a debugger
STACK = signal.SIGUSR2  # asks a rank for its Python stack


def alive(folder: Path, rank: int) -> None:
    """Begin this rank's signs of life: a thread that touches ranks/<rank>.alive, which holds the process's number."""
    file = folder / f"{rank}.alive"
    file.write_text(str(os.getpid()))
    stack = (folder / f"{rank}.stack").open("a")  # one of before a restart stays
    faulthandler.register(STACK, stack, all_threads=True)

    def touch() -> None:
        while True:
            time.sleep(EVERY_S)
            with contextlib.suppress(OSError):  # a full disk is the run's to complain of
                os.utime(file)

    threading.Thread(target=touch, name="signs of life", daemon=True).start()


class Watch:
    """Looks at the ranks of this machine until it is left; `lost` says of those that it ended why.

    A rank that gives no sign of life is ended after `heartbeat_timeout_s` where it was stopped, else after `stuck_s`: it may have
    one long call to make that lets nobody else in. `abandoned` is called, in another thread, when all ranks have ended, one
    of them badly, and nobody has noticed for a while: the launcher waits for a machine that cannot be reached any more.
    """

    def __init__(self, folder: Path, heartbeat_timeout_s: float, stuck_s: float, restarts: bool = False) -> None:
        self.lost: dict[int, str] = {}
        self.abandoned: Callable[[], None] | None = None
        self._folder, self._silent_s, self._stuck_s = folder, heartbeat_timeout_s, stuck_s
        self._patience = RESTARTING_S if restarts else ABANDONED_S
        self._looks: dict[Path, tuple[float, int]] = {}  # a rank's last sign, and how often it was seen: our own time
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
            ended_since = (ended_since or time.monotonic()) if self._all_ended_badly() else None
            if self.abandoned is not None and ended_since is not None and time.monotonic() > ended_since + self._patience:
                self.abandoned()
            for file in self._folder.glob("*.alive"):
                with contextlib.suppress(OSError, ValueError):
                    self._look_at(file)

    def _look_at(self, file: Path) -> None:
        # Not by the clock: it goes on while the whole machine sleeps, ranks and watch alike.
        sign, (before, seen) = file.stat().st_mtime, self._looks.get(file, (0.0, 0))
        seen = seen + 1 if sign == before else 0
        self._looks[file] = sign, seen
        if not seen:  # one that was ended has started again
            self.lost.pop(int(file.stem), None)
        silent = seen * EVERY_S
        if silent <= min(self._silent_s, self._stuck_s) or file.with_suffix(".json").exists():
            return
        process = int(file.read_text())
        state = _state(process)
        if state is not None and silent > (self._silent_s if state in STOPPED else self._stuck_s):
            self._end(int(file.stem), process, state, silent, file)

    def _all_ended_badly(self) -> bool:
        begun = [file.with_suffix(".json") for file in self._folder.glob("*.alive")]
        return bool(begun) and all(file.exists() for file in begun) and any(map(_told, begun))

    def _end(self, rank: int, process: int, state: str, silent: float, file: Path) -> None:
        file.unlink()  # once
        stack = self._folder / f"{rank}.stack"
        before = stack.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            _ask_for_stack(process)
            os.kill(process, signal.SIGCONT)  # a stopped process answers when it goes on
            until = time.monotonic() + 2
            while stack.stat().st_size == before and time.monotonic() < until:
                time.sleep(0.05)
        how = {"D": "waiting for a disk or device"}.get(state, "stopped (SIGSTOP)" if state in STOPPED else "stuck")
        where = f"; where it was: {stack}" if stack.stat().st_size > before else ""
        self.lost[rank] = f"rank {rank} gave no sign of life for {silent:.0f} s ({how}), and was ended{where}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class Deaths(logging.Handler):
    """While it is entered torch's launcher is silent, and `why` is what came over the rank that it last saw end badly.

    The launcher starts the others again by itself, and tells nobody but its log.
    """

    def __init__(self, folder: Path, watch: Watch) -> None:
        super().__init__()
        self.folder, self.why = folder, ""
        self._watch, self._undo = watch, contextlib.ExitStack()

    def __enter__(self) -> Deaths:
        import torch.distributed.launcher.api

        telling = logging.getLogger(torch.distributed.elastic.multiprocessing.api.__name__)
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(SPEAKERS)]:
            speaker = logging.getLogger(name)
            self._undo.callback(speaker.setLevel, speaker.level)
            speaker.setLevel(logging.CRITICAL)
        telling.setLevel(logging.ERROR)
        telling.addHandler(self)
        self._undo.callback(telling.removeHandler, self)
        self._undo.callback(setattr, telling, "propagate", telling.propagate)
        telling.propagate = False
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def emit(self, record: logging.LogRecord) -> None:
        own, of_others = [], ""
        for file in sorted(self.folder.glob("*.alive")):
            with contextlib.suppress(OSError, ValueError):
                if told := _told(file.with_suffix(".json")):
                    own += [] if is_of_others(told["error"]) else [f"rank {file.stem}: {told['error']}"]
                    of_others = of_others or f"rank {file.stem}: {told['error']}"
                elif _state(int(file.read_text())) is None:
                    own.append(wordless(f"rank {file.stem}"))
        self.why = "; ".join([*self._watch.lost.values(), *own]) or of_others


def wordless(ranks: str) -> str:
    """What is said of ranks that ended and left no result."""
    return f"{ranks} died without a word (killed, or out of memory)"


def _state(process: int) -> str | None:
    """One letter of the state of a process that this one began; None where it is gone, or where the system does not tell."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return state if int(parent) == os.getpid() and state != "Z" else None


def _ask_for_stack(process: int) -> None:
    """To its main thread, which shows where it stood before it goes on: another one shows where it has got to by then."""
    to_thread = getattr(ctypes.CDLL(None), "tgkill", None)
    if to_thread is None or to_thread(process, process, STACK) != 0:
        os.kill(process, STACK)


def _told(file: Path) -> dict[str, Any] | None:
    """What a rank wrote at its end, if that was a failure."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):  # it is being written, or there is none
        return None
    return content if content["code"] else None
