"""Signatures of what runs record of this machine, so that a stranger's files cannot pass as one's own.

A run's directory may have come from anybody. What it records of trust, paths and devices counts only if this user's own
drivetrain wrote it, which the signature shows: it is made with a random key that stays in the user's state folder.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path

from drivetrain.core.user_state import keep_first, user_state

KEY_BYTES = 32


def key_file() -> Path:
    """The file of this user's key: below $XDG_STATE_HOME, else ~/.local/state."""
    return user_state() / "key"


def sign(content: object) -> str | None:
    """Return the signature of JSON content (HMAC-SHA256, RFC 2104); None where the user's state folder cannot be written."""
    key = _key()
    return _signature(key, content) if key is not None else None


def is_own(content: object, signature: object) -> bool:
    """Whether `sign(content)` gave this signature, for this user."""
    key = _read_key() if isinstance(signature, str) else None
    # As bytes: `compare_digest` takes no text that is not ASCII.
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
