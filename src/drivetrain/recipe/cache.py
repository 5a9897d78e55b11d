"""Recipes that were fetched, kept in the user's cache folder by the SHA-256 of their bytes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import UserError
from drivetrain.core.paths import user_cache

if TYPE_CHECKING:
    from drivetrain.recipe.web import Fetched

on_fetch: list[Callable[[str, Fetched], None]] = []  # called with an address and what it gave, before anything is made of it


def sha256_of(content: bytes) -> str:
    """The SHA-256 of bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


def folder() -> Path:
    """The folder of the fetched recipes."""
    return user_cache() / "recipes"


def kept(sha256: str, suffix: str = ".yaml") -> Path | None:
    """The file with these bytes. One that has been changed since counts as missing."""
    path = folder() / f"{sha256}{suffix}"
    try:
        return path if sha256_of(path.read_bytes()) == sha256 else None
    except OSError:
        return None


def keep(content: bytes, suffix: str = ".yaml") -> Path:
    """Write bytes into the cache; their file. Raises UserError."""
    path = folder() / f"{sha256_of(content)}{suffix}"
    write(path, content)
    return path


def sha256_at(address: str) -> str | None:
    """The SHA-256 of what an address gave when it was fetched; None if it was not."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _note(address).read_text(encoding="utf-8").partition(" ")[0]
    return None


def remember(address: str, sha256: str) -> None:
    """Note what an address gave, for one whose pin is a commit and not the SHA-256 itself."""
    write(_note(address), f"{sha256} {address}\n".encode())


def _note(address: str) -> Path:
    return folder() / "addresses" / sha256_of(address.encode())


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """Let one process fetch at a time: ranks that another launcher started together find what the first has fetched."""
    path = folder() / ".lock"
    make_folder(path.parent)
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, content: bytes) -> None:
    """Write a file at once: a reader sees all of it or none. Raises UserError."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(error) from None


def make_folder(path: Path) -> None:
    """Make a folder of the cache. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise _unwritable(error) from None


def _unwritable(error: OSError) -> UserError:
    return UserError(f"the cache folder {user_cache()} cannot be written ({error.strerror}): set XDG_CACHE_HOME to one that can")
