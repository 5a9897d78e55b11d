"""Cleans the cache of compiled kernels that is kept between runs."""

from __future__ import annotations

import struct
import time
from pathlib import Path

_LINKING_S = 5.0  # a linker may still be writing a younger file


def drop_broken(folder: Path) -> list[Path]:
    """Delete the shared objects under `folder` that a killed linker left incomplete: the compiler would load them."""
    broken = [file for file in folder.rglob("*.so") if time.time() - file.stat().st_mtime > _LINKING_S and not _is_complete(file)]
    for file in broken:
        file.unlink(missing_ok=True)
    return broken


def _is_complete(file: Path) -> bool:
    """Return whether a 64-bit ELF file contains its section table, which linkers write last. Other formats pass."""
    with file.open("rb") as opened:
        header = opened.read(64)
    if len(header) < 64 or not any(header):
        return False
    if header[:5] != b"\x7fELF\x02":
        return True
    (table,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    return file.stat().st_size >= table + size * count > 0
