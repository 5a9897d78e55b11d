"""Compiled kernels that are kept between runs."""

from __future__ import annotations

import struct
import time
from pathlib import Path

_LINKING_S = 5.0  # a younger file may still be under a linker's hands


def drop_broken(folder: Path) -> list[Path]:
    """Delete the shared objects under `folder` that a killed linker left unfinished: the compiler would load them as they are."""
    broken = [file for file in folder.rglob("*.so") if time.time() - file.stat().st_mtime > _LINKING_S and not _whole(file)]
    for file in broken:
        file.unlink(missing_ok=True)
    return broken


def _whole(file: Path) -> bool:
    """Whether an ELF file of 64 bits reaches to the end of its section table, which linkers put last; other formats pass."""
    with file.open("rb") as opened:
        head = opened.read(64)
    if len(head) < 64 or not any(head):
        return False
    if head[:5] != b"\x7fELF\x02":
        return True
    (table,) = struct.unpack_from("<Q", head, 40)
    size, count = struct.unpack_from("<HH", head, 58)
    return file.stat().st_size >= table + size * count > 0
