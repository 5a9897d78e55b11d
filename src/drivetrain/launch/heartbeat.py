"""Watches the life and progress of this machine's ranks, and collects the stacks of hanging ranks."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.machine import files
from drivetrain.core.machine.files import read_json
from drivetrain.core.machine.forking import end_with_parent
from drivetrain.core.typed import JsonObject

if TYPE_CHECKING:
    pass


INTERVAL_S = 1.0
ABANDONED_AFTER_S = 12.0
ABANDONED_AFTER_RESTARTABLE_S = 75.0  # with restarts left: other machines' ranks first write a last checkpoint
STACK_WAIT_S = 2.0  # for a rank's stack
STOPPED = ("T", "t")  # process states: stopped by a signal, by a debugger
STACK_SIGNAL = signal.SIGUSR2  # asks a rank for its Python stack
RankResults = dict[int, JsonObject]  # rank → the content of its result file


def start_heartbeat(folder: Path, rank: int) -> None:
    """Start the thread that touches `folder`/<rank>.heartbeat, which holds this process's id; write stacks next to it."""
    file = folder / f"{rank}.heartbeat"
    with files.opened(file, "w") as opened:
        opened.write(str(os.getpid()))
    stack = files.opened(folder / f"{rank}.stack", "a")  # append, so that the stack from before a restart stays
    faulthandler.register(STACK_SIGNAL, stack, all_threads=True)

    end_with_parent()  # without the launcher, ranks would wait for its store and keep a resumable run locked

    def touch() -> None:
        while True:
            time.sleep(INTERVAL_S)
            with contextlib.suppress(OSError):  # on a full disk the run itself fails, with a better message
                os.utime(file, follow_symlinks=False)

    threading.Thread(target=touch, name="heartbeat", daemon=True).start()


class HeartbeatMonitor:
    """A context manager that ends ranks of this machine without a heartbeat; `ended` holds the reason of each.

    A stopped process is ended after `heartbeat_timeout_s`, any other after `stuck_s`, because one long library call may block
    the heartbeat's thread. The monitor's thread calls `abandoned` when all ranks have ended, at least one with an error, and
    torch's launcher still waits for an unreachable machine.
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
        # Count checks, not time: a clock advances while the machine sleeps, and ranks and monitor sleep with it.
        beat, (before, checks) = file.lstat().st_mtime, self._last.get(file, (0.0, 0))
        checks = checks + 1 if beat == before else 0
        self._last[file] = beat, checks
        rank = int(file.stem)
        if not checks:  # an ended rank has started again
            self.ended.pop(rank, None)
        silent_s = checks * INTERVAL_S
        if silent_s <= min(self._heartbeat_timeout_s, self._stuck_s) or file.with_suffix(".json").exists():
            return
        process = int(files.read_text(file))
        state = process_state(process)
        if state is not None and silent_s > (self._heartbeat_timeout_s if state in STOPPED else self._stuck_s):
            self._end(rank, process, state, silent_s, file)

    def _all_ended_with_a_failure(self) -> bool:
        results = read_results(self._folder)
        begun = [results.get(rank) for rank in begun_ranks(self._folder)]
        return None not in begun and any(result["code"] for result in begun if result is not None)

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


def process_state(process: int) -> str | None:
    """The state of a child process, one letter as in /proc; None if it has ended or without /proc."""
    try:
        state, parent = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return state if int(parent) == os.getpid() and state != "Z" else None


def _ask_for_stack(process: int) -> None:
    """Send the signal to the main thread, so that its stack shows where it hangs; another thread would run on first."""
    send_to_thread = getattr(ctypes.CDLL(None), "tgkill", None)
    if send_to_thread is None or send_to_thread(process, process, STACK_SIGNAL) != 0:
        os.kill(process, STACK_SIGNAL)


def begun_ranks(folder: Path) -> list[int]:
    """The started ranks of this machine, in order."""
    return sorted(int(file.stem) for file in folder.glob("*.heartbeat"))


def read_results(folder: Path) -> RankResults:
    results: RankResults = {}
    for file in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):  # it is being written
            results[int(file.stem)] = read_json(file)
    return results
