"""Tar archives that are read without unpacking them, and downloads that are checked against a digest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from drivetrain.core.errors import DataError, UserError
from drivetrain.data.untrusted import ordinary


def check_member(archive: object, member: tarfile.TarInfo) -> None:
    """Raise DataError for a tar member that is a link or a device, or whose path leads out of the archive."""
    path = PurePosixPath(member.name)
    if member.issym() or member.islnk():
        problem = "is a link"
    elif path.is_absolute() or ".." in path.parts:
        problem = "points out of the archive"
    elif not (member.isfile() or member.isdir()):
        problem = "is neither a file nor a folder"
    else:
        return
    raise DataError(f"{archive}: its member {member.name!r} {problem}, which no data set needs: refused")


def read_members(archive: Path, names: set[str], max_bytes: int) -> dict[str, bytes]:
    """Read the files called `names`, in any folder of a tar archive. Raises DataError if it unpacks to over `max_bytes`."""
    found: dict[str, bytes] = {}
    total = 0
    try:
        with open(archive, "rb", opener=ordinary) as file, tarfile.open(fileobj=file) as tar:
            for member in tar:
                check_member(archive, member)
                total += member.size  # members that are skipped count too: they are decompressed on the way
                if total > max_bytes:
                    raise DataError(f"{archive} unpacks to more than {max_bytes:,} bytes: it is not the archive it should be")
                name = PurePosixPath(member.name).name
                if member.isfile() and name in names:
                    content = tar.extractfile(member)
                    found[name] = content.read() if content is not None else b""
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{archive} cannot be read as a tar archive ({error}): fetch it again") from None
    return found


def download(url: str, path: Path, sha256: str) -> None:
    """Download `url` to `path`, unless it is there. The file is complete and has this digest, or it is not kept.

    One process of a machine downloads; the others wait for it. Raises UserError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _file_lock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            _download(url, path, sha256)


def _download(url: str, path: Path, sha256: str) -> None:
    from urllib.request import urlopen

    partial = path.with_name(f".{path.name}.{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with urlopen(url, timeout=60) as response, partial.open("wb") as file:
            while block := response.read(1 << 20):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{url} could not be fetched ({error}): put the archive at {path} by hand") from None
    if digest.hexdigest() != sha256:
        partial.unlink()
        raise UserError(f"{url} gave a file whose SHA-256 is {digest.hexdigest()}, not {sha256}: it was not kept")
    partial.replace(path)


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Let one process of this machine in at a time."""
    import fcntl

    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    path.unlink(missing_ok=True)
