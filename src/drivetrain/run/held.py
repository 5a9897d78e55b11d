"""Finds a run's directory again after it was moved away, and notices that it was removed."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path

GONE = (errno.ENOENT, errno.ENOTDIR)


class Held:
    """A run's directory, held by its descriptor, which stays the same directory wherever it is moved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)) if os.name == "posix" else None
        if self._handle is not None:
            weakref.finalize(self, os.close, self._handle)

    def folder(self) -> Path | None:
        """Return where the directory is now: its own path, or that to which it was moved; None where it was removed."""
        if self._handle is None:
            return self.path
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._handle)):
                return self.path
        except OSError as error:
            if error.errno not in GONE:  # the disk does not answer: writing tells why
                return self.path
        return self._moved_to(self._handle)

    def place(self) -> Path:
        """Return where the run's files belong now: in `folder()`, or, if that was removed, in a new directory beside it."""
        folder = self.folder()
        if folder is None:
            folder = self.path.with_name(f"{self.path.name}-rescued")
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _moved_to(self, handle: int) -> Path | None:
        try:
            found = Path(_path_of(handle))
            return found if os.path.samestat(os.stat(found), os.fstat(handle)) else None
        except OSError:
            return None


def _path_of(handle: int) -> str:
    """Return the present path of an open directory."""
    import fcntl

    if (get_path := getattr(fcntl, "F_GETPATH", None)) is not None:  # macOS
        return os.fsdecode(fcntl.fcntl(handle, get_path, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{handle}")
