"""Atomic writing of files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write JSON to a temporary file, sync it and rename it: a reader sees the whole content or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(content, file, indent=2, default=str)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
