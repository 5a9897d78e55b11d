"""Files of a test."""

from pathlib import Path
from typing import Any


def put(path: Path, content: Any = "") -> Path:
    """Write a text, bytes or a picture, and make the folders above it; return where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content.save(path)
    return path
