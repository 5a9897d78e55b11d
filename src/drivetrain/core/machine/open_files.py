"""Positions in open files. A forked process shares them with its parent, so that reads of one would move the other's."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping

DESCRIPTORS = "/proc/self/fd"  # only on Linux: elsewhere nothing can be opened again
LISTED = "/dev/fd"


def positions() -> dict[int, tuple[int, int, int]]:
    """Return this process's positions in readable files, by descriptor: offset, device, inode.

    Write-only files such as logs have none.
    """
    import fcntl

    found = {}
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir(LISTED)):
            with contextlib.suppress(OSError):  # the listing's own descriptor, closed by now
                about = os.fstat(number)
                if stat.S_ISREG(about.st_mode) and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                    found[number] = os.lseek(number, 0, os.SEEK_CUR), about.st_dev, about.st_ino
    return found


def opened_again(number: int) -> int | None:
    """Return a new descriptor of a read-only open file; None where that is impossible."""
    import fcntl

    try:
        flags = fcntl.fcntl(number, fcntl.F_GETFL)
        if flags & (os.O_ACCMODE | os.O_PATH) != os.O_RDONLY:
            return None
        return os.open(f"{DESCRIPTORS}/{number}", flags & ~os.O_NOFOLLOW | os.O_CLOEXEC)  # sqlite sets O_NOFOLLOW
    except (OSError, AttributeError):  # no O_PATH: no such folder either
        return None


def _own(before: Mapping[int, tuple[int, int, int]]) -> None:
    """In a forked process: reopen read-only files at the parent's positions."""
    for number, (offset, *_) in before.items():
        new = opened_again(number)
        if new is not None:
            os.lseek(new, offset, os.SEEK_SET)
            os.dup2(new, number, inheritable=os.get_inheritable(number))
            os.close(new)


_before: dict[int, tuple[int, int, int]] = {}  # for the current fork
_forks = 0  # open contexts of `apart_after_fork`


def _note() -> None:
    global _before
    _before = positions() if _forks else {}


@contextlib.contextmanager
def apart_after_fork() -> Iterator[None]:
    """Within the context forked processes get their own positions in read-only files."""
    global _forks
    _forks += 1
    try:
        yield
    finally:
        _forks -= 1


if hasattr(os, "register_at_fork"):  # for any caller of fork: multiprocessing, torch's DataLoader and its launcher
    os.register_at_fork(before=_note, after_in_child=lambda: _own(_before))
