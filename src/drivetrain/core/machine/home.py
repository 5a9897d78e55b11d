"""This user's files on this machine, outside all runs: below $XDG_STATE_HOME, else ~/.local/state."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from drivetrain.core.machine import files


def state_dir() -> Path:
    """The folder of files that outlive a run. Without a home, or with a relative one, nothing can be written below it."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    return (folder if folder.is_absolute() else Path(os.devnull)) / "drivetrain"


def keep_first(file: Path, content: bytes) -> None:
    """Write a file of the folder at once, unless it exists: with several processes the first one's content counts.

    If the folder cannot be written, nothing happens.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with files.beside(file, 0o600) as (writer, temporary):
            writer.write(content)
            writer.flush()
            os.link(temporary, file)


def measured_once(what: Sequence[object], measure: Callable[[], float]) -> float:
    """Return the first positive number measured for `what` on this machine; measure and keep it if there is none.

    So all runs, all ranks of a run and resumed runs choose alike.
    """
    file = state_dir() / "measured" / hashlib.sha256(repr(tuple(what)).encode()).hexdigest()[:32]
    if (kept := _number(file)) is not None:
        return kept
    number = measure()
    keep_first(file, f"{number!r}\n".encode())
    kept = _number(file)
    return number if kept is None else kept


def _number(file: Path) -> float | None:
    """The number in a file; None without one. Any other content is removed, so that a number can replace it."""
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


KEY_BYTES = 32


def key_file() -> Path:
    """The file of this user's key: below $XDG_STATE_HOME, else ~/.local/state."""
    return state_dir() / "key"


def sign(content: object) -> str | None:
    """Return the signature of JSON content (HMAC-SHA256, RFC 2104); None where the user's state folder cannot be written."""
    key = _key()
    return _signature(key, content) if key is not None else None


def is_own(content: object, signature: object) -> bool:
    """True if `sign(content)` gave this signature, for this user."""
    key = _read_key() if isinstance(signature, str) else None
    # As bytes: `compare_digest` takes only ASCII text.
    given = str(signature).encode("utf-8", "surrogatepass")
    return key is not None and hmac.compare_digest(_signature(key, content).encode(), given)


def _signature(key: bytes, content: object) -> str:
    return hmac.new(key, json.dumps(content, sort_keys=True, default=str).encode(), hashlib.sha256).hexdigest()


def _key() -> bytes | None:
    """The user's key, made at its first use."""
    if (key := _read_key()) is not None:
        return key
    keep_first(key_file(), secrets.token_bytes(KEY_BYTES))
    return _read_key()


def _read_key() -> bytes | None:
    try:
        key = key_file().read_bytes()
    except (OSError, RuntimeError):
        return None
    return key if len(key) == KEY_BYTES else None
