"""Keeps the compiler's cache beside the results, where it is small enough to travel with them."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path

from bench import harness

ARCHIVE = "compiler-cache.tar.gz"
CARRIED = harness.ROOT / ".gpu"  # not of the checkout: what is brought along, wheels too
LARGEST = 16 * 2**20  # bytes of the archive


def cache_folder() -> Path:
    """Where the compiler's cache is in this call; it is filled from the archive that was carried, if one was."""
    folder = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/drivetrain-gpu-{os.getuid()}"))
    if (CARRIED / ARCHIVE).exists() and not folder.exists():
        with tarfile.open(CARRIED / ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
    return folder


def keep_cache(folder: Path, out: Path) -> None:
    """Write the cache to the folder that travels, unless it is too large."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for file in folder.rglob("*"):
            if file.is_file() and file.suffix != ".lock":
                archive.add(file, file.relative_to(folder))
    if packed.tell() > LARGEST:
        print(f"the compiler's cache does not travel: {packed.tell() / 2**20:.0f} MiB packed")
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / ARCHIVE).write_bytes(packed.getvalue())
