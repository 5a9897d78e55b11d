"""What is kept for this user on this machine, outside all run directories: below $XDG_STATE_HOME, else ~/.local/state."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path


def user_state() -> Path:
    """The folder of what is kept. Without a home, or with a relative one, nothing can be written below what this returns."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    return (folder if folder.is_absolute() else Path(os.devnull)) / "drivetrain"


def keep_first(file: Path, content: bytes) -> None:
    """Write a file of the folder at once, unless it is there: of several processes, the first one's content counts.

    Nothing is written where the folder cannot be.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as writer:
            writer.write(content)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
        temporary.unlink()


def measured_once(what: Sequence[object], measure: Callable[[], float]) -> float:
    """Return the positive number that was measured first for `what` on this machine, or measure it now and keep it.

    Runs that choose by it choose alike, and so do the ranks of a run, and a run that goes on.
    """
    file = user_state() / "measured" / hashlib.sha256(repr(tuple(what)).encode()).hexdigest()[:32]
    if (kept := _number(file)) is not None:
        return kept
    number = measure()
    keep_first(file, f"{number!r}\n".encode())
    kept = _number(file)
    return number if kept is None else kept


def _number(file: Path) -> float | None:
    """The number in a file; None where there is none. What is no number is removed, so that another can take its place."""
    try:
        number = float(file.read_bytes()[:40])
    except OSError:
        return None
    except ValueError:
        number = math.nan
    if number > 0 and math.isfinite(number):
        return number
    with contextlib.suppress(OSError):
        file.unlink()
    return None
