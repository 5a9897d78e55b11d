"""Explains errors of a machine whose limits a run has reached: open files, and the memory that processes share."""

from __future__ import annotations

import errno
import shutil

SHARED_MEMORY = ("insufficient shared memory", "Bus error", "shm_open", "/dev/shm", "unable to write to file </torch_")
TOO_MANY_FILES = ("Too many open files", "received 0 items of ancdata")


def explain(error: BaseException) -> str | None:
    """Return what is exhausted and what to set; None for other errors."""
    text = f"{error} {error.__cause__ or ''}"
    refused = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    if refused or any(sign in text for sign in TOO_MANY_FILES):
        return (
            f"this process may not open more files{_limit()}: raise the limit (`ulimit -n 65536` in the shell that starts "
            "the run), or lower loader.num_workers"
        )
    if any(sign in text for sign in SHARED_MEMORY):
        return (
            f"the memory that processes share is used up{_shared()}: make /dev/shm larger (docker run --shm-size=8g, or "
            "--ipc=host), lower loader.num_workers or loader.prefetch_factor, or set loader=threads, whose threads need none"
        )
    return None


def _limit() -> str:
    try:
        import resource
    except ImportError:  # on Windows
        return ""
    return f" (its limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"


def _shared() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return ""
    return f" (/dev/shm has {usage.total / 2**20:,.0f} MB, {usage.free / 2**20:,.0f} MB free)"
