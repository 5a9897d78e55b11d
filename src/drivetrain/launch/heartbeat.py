"""Heartbeats of the ranks of one machine, and the reasons of those that fail.

Each rank touches a file once a second, and ends where the launching process is gone. The monitor in the launching process ends
a rank whose file stays untouched too long, after asking it for its Python stack.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drivetrain.core import files
from drivetrain.core.errors import is_peer_failure
from drivetrain.core.forking import end_with_parent

INTERVAL_S = 1.0
ABANDONED_AFTER_S = 12.0
ABANDONED_AFTER_RESTARTABLE_S = 75.0  # while ranks may start again: those of other machines first write a last checkpoint
STACK_WAIT_S = 2.0  # for a rank's stack
TORCH_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
STOPPED = ("T", "t")  # process states: stopped by a signal, by a debugger
STACK_SIGNAL = signal.SIGUSR2  # asks a rank for its Python stack


def start_heartbeat(folder: Path, rank: int) -> None:
    """Start the thread that touches `folder`/<rank>.heartbeat, which holds this process's id; write stacks beside it."""
    file = folder / f"{rank}.heartbeat"
    with files.opened(file, "w") as opened:
        opened.write(str(os.getpid()))
    stack = files.opened(folder / f"{rank}.stack", "a")  # appended to: the stack of before a restart stays
    faulthandler.register(STACK_SIGNAL, stack, all_threads=True)

    end_with_parent()  # without the launcher the ranks would wait for its store, and hold the run, which can be gone on with

    def touch() -> None:
        while True:
            time.sleep(INTERVAL_S)
            with contextlib.suppress(OSError):  # on a full disk the run itself fails, with a better message
                os.utime(file, follow_symlinks=False)

    threading.Thread(target=touch, name="heartbeat", daemon=True).start()


class HeartbeatMonitor:
    """A context manager that ends ranks of this machine without a heartbeat; `ended` holds the reason of each.

    A stopped process is ended after `heartbeat_timeout_s`, any other after `stuck_s`: one long call into a library may
    keep the heartbeat's thread from running. `abandoned` is called, in the monitor's thread, when all ranks have ended, at least
    one of them with an error, and torch's launcher has not noticed: it waits for a machine that is out of reach.
    """

    def __init__(self, folder: Path, heartbeat_timeout_s: float, stuck_s: float, restarts: bool = False) -> None:
        self.ended: dict[int, str] = {}
        self.abandoned: Callable[[], None] | None = None
        self._folder, self._heartbeat_timeout_s, self._stuck_s = folder, heartbeat_timeout_s, stuck_s
        self._abandoned_after_s = ABANDONED_AFTER_RESTARTABLE_S if restarts else ABANDONED_AFTER_S
        self._last: dict[Path, tuple[float, int]] = {}  # a rank's last heartbeat, and the checks since it changed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat monitor", daemon=True)

    def __enter__(self) -> HeartbeatMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        failed_since: float | None = None
        while not self._stop.wait(INTERVAL_S):
            failed_since = (failed_since or time.monotonic()) if self._all_ended_with_a_failure() else None
            waited = 0.0 if failed_since is None else time.monotonic() - failed_since
            if self.abandoned is not None and waited > self._abandoned_after_s:
                self.abandoned()
            for file in self._folder.glob("*.heartbeat"):
                with contextlib.suppress(OSError, ValueError):
                    self._check(file)

    def _check(self, file: Path) -> None:
        # Checks are counted and not timed: a clock goes on while the machine sleeps, with the ranks and the monitor on it.
        beat, (before, checks) = file.lstat().st_mtime, self._last.get(file, (0.0, 0))
        checks = checks + 1 if beat == before else 0
        self._last[file] = beat, checks
        rank = int(file.stem)
        if not checks:  # a rank that was ended has started again
            self.ended.pop(rank, None)
        silent_s = checks * INTERVAL_S
        if silent_s <= min(self._heartbeat_timeout_s, self._stuck_s) or file.with_suffix(".json").exists():
            return
        process = int(files.read_text(file))
        state = _process_state(process)
        if state is not None and silent_s > (self._heartbeat_timeout_s if state in STOPPED else self._stuck_s):
            self._end(rank, process, state, silent_s, file)

    def _all_ended_with_a_failure(self) -> bool:
        results = [file.with_suffix(".json") for file in self._folder.glob("*.heartbeat")]
        return bool(results) and all(file.exists() for file in results) and any(map(_failure_in, results))

    def _end(self, rank: int, process: int, state: str, silent_s: float, file: Path) -> None:
        file.unlink()  # a rank is ended once
        stack = self._folder / f"{rank}.stack"
        before = stack.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            _ask_for_stack(process)
            os.kill(process, signal.SIGCONT)  # a stopped process writes its stack when it continues
            until = time.monotonic() + STACK_WAIT_S
            while stack.stat().st_size == before and time.monotonic() < until:
                time.sleep(0.05)
        how = {"D": "waiting for a disk or device"}.get(state, "stopped (SIGSTOP)" if state in STOPPED else "stuck")
        where = f"; its stack: {stack}" if stack.stat().st_size > before else ""
        self.ended[rank] = f"rank {rank} gave no heartbeat for {silent_s:.0f} s ({how}) and was ended{where}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


class FailureRecorder(logging.Handler):
    """A context manager that silences torch's launcher; `reason` is why the ranks that failed last did so.

    The launcher starts all ranks again by itself, and reports that to its log alone: a record there is the moment to look.
    """

    def __init__(self, folder: Path, monitor: HeartbeatMonitor) -> None:
        super().__init__()
        self.folder, self.reason = folder, ""
        self._monitor, self._undo = monitor, contextlib.ExitStack()

    def __enter__(self) -> FailureRecorder:
        import torch.distributed.launcher.api

        reporting = logging.getLogger(torch.distributed.elastic.multiprocessing.api.__name__)
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(TORCH_LOGGERS)]:
            logger = logging.getLogger(name)
            self._undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        reporting.setLevel(logging.ERROR)
        reporting.addHandler(self)
        self._undo.callback(reporting.removeHandler, self)
        self._undo.callback(setattr, reporting, "propagate", reporting.propagate)
        reporting.propagate = False
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Read why ranks failed; what a rank says of a peer that is gone counts only where nothing else is known."""
        own, of_peers = [], ""
        for file in sorted(self.folder.glob("*.heartbeat")):
            with contextlib.suppress(OSError, ValueError):
                if failure := _failure_in(file.with_suffix(".json")):
                    line = f"rank {file.stem}: {failure['error']}"
                    own += [] if is_peer_failure(failure["error"]) else [line]
                    of_peers = of_peers or line
                elif _process_state(int(files.read_text(file))) is None:
                    own.append(ended_without_result({int(file.stem): 0}))
        self.reason = "; ".join([*self._monitor.ended.values(), *own]) or of_peers


def ended_without_result(ranks: Mapping[int, int]) -> str:
    """Return the error of ranks whose processes ended without writing a result: rank → exit code, 0 where it is not known."""
    names = " and ".join(f"rank {rank}" for rank in sorted(ranks)) or "a rank"
    return f"{names} ended without a result ({' and '.join(dict.fromkeys(map(_how, ranks.values()))) or _how(0)})"


def _how(code: int) -> str:
    """How a process ended, by its exit code: a signal's number is negative."""
    if code in (0, -signal.SIGKILL):
        return "killed, or out of memory"
    return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _process_state(process: int) -> str | None:
    """The state of a child process, one letter as in /proc; None where it has ended, or where there is no /proc."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return state if int(parent) == os.getpid() and state != "Z" else None


def _ask_for_stack(process: int) -> None:
    """Send the signal to the main thread, whose stack then is that of where it was stuck; another thread would run on first."""
    send_to_thread = getattr(ctypes.CDLL(None), "tgkill", None)
    if send_to_thread is None or send_to_thread(process, process, STACK_SIGNAL) != 0:
        os.kill(process, STACK_SIGNAL)


def _failure_in(file: Path) -> dict[str, Any] | None:
    """The content of a rank's result file if the rank failed."""
    try:
        content: dict[str, Any] = files.read_json(file)
    except (OSError, ValueError):  # not there, or being written
        return None
    return content if content["code"] else None
