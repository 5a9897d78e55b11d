"""Explains errors at a machine's limits: open files, shared memory, and a process's address space."""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys

SHARED_MEMORY = (
    "insufficient shared memory", "Bus error", "shm_open", "/dev/shm", "unable to write to file </torch_",
    "unable to allocate shared memory",
)  # fmt: skip
NO_ADDRESSES = ("failed to map segment", "annot allocate memory", "unable to mmap")  # from libraries that fail to load
TOO_MANY_FILES = ("Too many open files", "received 0 items of ancdata")
FULL = 2**20  # free bytes of shared memory


def explain(error: BaseException) -> str | None:
    """Return the exhausted resource and the setting to change; None for other errors."""
    text = f"{error} {error.__cause__ or ''}"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE) or any(sign in text for sign in TOO_MANY_FILES):
        return (
            f"this process may not open more files{_limit('NOFILE')}: raise the limit (`ulimit -n 65536` in the shell that "
            "starts the run), or lower loader.num_workers"
        )
    size, free = 0, sys.maxsize  # of a system other than Linux
    with contextlib.suppress(OSError):
        size, _, free = shutil.disk_usage("/dev/shm")
    no_file = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None  # a semaphore, say
    if any(sign in text for sign in SHARED_MEMORY) or (no_file and free < FULL):
        has = f" (/dev/shm has {size / 2**20:,.1f} MB, {free / 2**20:,.1f} MB free)" if size else ""
        return (
            f"shared memory is used up{has}: make /dev/shm larger (docker run --shm-size=8g, or "
            "--ipc=host), lower loader.num_workers or loader.prefetch_factor, or set loader=threads, which needs none"
        )
    no_room = isinstance(error, MemoryError) or any(sign in text for sign in NO_ADDRESSES)
    if no_room and (limit := _limit("AS")):
        return (
            f"this process may not have more memory{limit}, and its libraries count too: raise the limit of the address "
            "space (`ulimit -v unlimited` in the shell that starts the run)"
        )
    return None


def _limit(name: str) -> str:
    """A limit of this process in words; empty without one."""
    try:
        import resource
    except ImportError:  # on Windows
        return ""
    limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    return f" (its limit is {f'{limit / 2**30:,.3g} GiB' if name == 'AS' else limit})"
