"""Files that came from elsewhere: tar members that stay in their archive, downloads that are what they should be."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from drivetrain.core.errors import DataError, UserError


def refuse_member(archive: object, member: tarfile.TarInfo) -> None:
    """Raise DataError for a tar member that is a link or a device, or that points out of its archive."""
    path = PurePosixPath(member.name)
    if member.issym() or member.islnk():
        what = "is a link"
    elif path.is_absolute() or ".." in path.parts:
        what = "points out of the archive"
    elif not (member.isfile() or member.isdir()):
        what = "is neither a file nor a folder"
    else:
        return
    raise DataError(f"{archive}: its member {member.name!r} {what}, which no data set needs: refused")


def tar_files(archive: Path, wanted: set[str], most: int) -> dict[str, bytes]:
    """The files of a tar archive whose last name is wanted. At most `most` bytes are unpacked. Raises DataError."""
    found: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                refuse_member(archive, member)
                total += member.size  # also of what is skipped: it is decompressed on the way
                if total > most:
                    raise DataError(f"{archive} unpacks to more than {most:,} bytes: it is not the archive it should be")
                name = PurePosixPath(member.name).name
                if member.isfile() and name in wanted:
                    file = tar.extractfile(member)
                    found[name] = file.read() if file is not None else b""
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{archive} cannot be read as a tar archive ({error}): fetch it again") from None
    return found


def download(url: str, path: Path, md5: str) -> None:
    """Fetch `url` to `path`, whole and with this digest, or not at all. One process of a machine fetches, the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            _fetch(url, path, md5)


def _fetch(url: str, path: Path, md5: str) -> None:
    from urllib.request import urlopen

    partial = path.with_name(f".{path.name}.{os.getpid()}")
    digest = hashlib.md5(usedforsecurity=False)
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
    if digest.hexdigest() != md5:
        partial.unlink()
        raise UserError(f"{url} gave a file whose md5 is {digest.hexdigest()}, not {md5}: it was not kept")
    partial.replace(path)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process of this machine at a time."""
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    lock.unlink(missing_ok=True)
