"""Watches the system calls by which a program and its children change files, and can stop at one of them. Linux on x86-64.

It is a debugger's way (ptrace): each process and thread halts when it enters a call that its filter names
(tests/support/traced.py). A kill at the entry of call k leaves on disk exactly what the calls before it did, whichever library
made them: Python, torch in C++, safetensors in Rust.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CONTINUE, INFO, SEIZE, INTERRUPT, LISTEN = 7, 0x420E, 0x4206, 0x4207, 0x4208
OPTIONS = 2 | 4 | 8 | 0x80  # follow fork, vfork and clone; halt where the filter says
ALL, MINE = 0x40000000, 0x20000000  # of waitpid: threads too, and only what this thread traces
FILTERED, FILTER_STOP, EVENT_STOP, CREATE = 3, 7, 128, 0x40
BY_FILE = {1: "write", 18: "pwrite", 20: "writev", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 285: "fallocate"}
BY_PATH = {2: "open", 76: "truncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 87: "unlink"}
BY_FOLDER = {257: "open", 258: "mkdir", 263: "unlink", 264: "rename", 316: "rename"}  # with a folder's descriptor before the path

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"


class Tracer(threading.Thread):
    """Counts the calls of a process that change something below `root`. At call number `at` it runs `then(process, call)`."""

    def __init__(self, pid: int, root: Path, at: int | None = None, then: Callable[[int, str], None] | None = None) -> None:
        super().__init__(name="tracer", daemon=True)
        self.count, self.struck = 0, ""
        self._pid, self._root, self._at, self._then = pid, str(root), at, then
        self._attached = threading.Event()
        self.start()
        self._attached.wait()

    def run(self) -> None:
        """Follow the process and its children to their ends."""
        ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        ptrace.argtypes, ptrace.restype = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_long
        attached = ptrace(SEIZE, self._pid, None, OPTIONS) == 0
        ptrace(INTERRUPT, self._pid, None, None)
        self._attached.set()
        info = ctypes.create_string_buffer(88)
        while attached:
            try:
                task, status = os.waitpid(-1, ALL | MINE)
            except ChildProcessError:  # all have ended
                return
            if not os.WIFSTOPPED(status):
                continue
            number, deliver = os.WSTOPSIG(status), 0
            if status >> 16 == FILTER_STOP:
                size = ptrace(INFO, task, len(info), ctypes.addressof(info))
                call = self._call(task, info.raw) if size > 0 and info.raw[0] == FILTERED else ""
                if call:
                    self.count += 1
                if call and self.count == self._at and self._then is not None:
                    self.struck = call
                    self._then(task, call)
            elif status >> 16 == EVENT_STOP:
                if number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
                    ptrace(LISTEN, task, None, None)
                    continue
            elif not status >> 16:
                deliver = number
            ptrace(CONTINUE, task, None, deliver)

    def _call(self, task: int, info: bytes) -> str:
        """The name of a call and its file, if it changes one below the root, else an empty text."""
        number, first, second, third = struct.unpack_from("<4Q", info, 24)
        with suppress(OSError):
            if number in BY_FILE:
                file = os.readlink(f"/proc/{task}/fd/{first}")
                return self._named(BY_FILE[number], file)
            if number in BY_PATH and (number != 2 or second & CREATE):
                return self._named(BY_PATH[number], os.path.join(os.readlink(f"/proc/{task}/cwd"), _text(task, first)))
            if number in BY_FOLDER and (number != 257 or third & CREATE):
                folder = "cwd" if first >= 2**31 else f"fd/{first}"
                return self._named(BY_FOLDER[number], os.path.join(os.readlink(f"/proc/{task}/{folder}"), _text(task, second)))
        return ""

    def _named(self, call: str, file: str) -> str:
        return f"{call} {os.path.relpath(file, self._root)}" if file.startswith(self._root) else ""


def _text(task: int, address: int) -> str:
    """A text in another process's memory."""
    with open(f"/proc/{task}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(512).split(b"\0", 1)[0].decode(errors="replace")
