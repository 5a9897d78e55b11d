"""The handling of a full or failing disk: one message, nothing half-written, and room for the result."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from drivetrain.core.errors import CannotSave, UserError
from drivetrain.core.machine import files
from drivetrain.saving import manifest

RESERVE = ".reserve"  # a placeholder file until the run ends, so that a full disk has room for result.json and the log
RESERVED = 2**18
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


class NoRoom(UserError):
    """A run's directory is not writable, before the run has begun."""


@contextlib.contextmanager
def reserved(run_dir: Path) -> Iterator[None]:
    """Reserve the space for the end of a run, and write its first files in the context. Raises NoRoom without space."""
    try:
        with files.opened(run_dir / RESERVE, "wb") as file:
            file.write(os.urandom(RESERVED))  # a compressing disk would store zeros in no space
        yield
    except OSError as error:
        release(run_dir)
        raise NoRoom(f"output_dir: no run can be written to {run_dir}: {_said(error)}{_free(run_dir)}") from None


def release(run_dir: Path) -> None:
    """Release the reserved space: the run has ended, or the disk is full."""
    with contextlib.suppress(OSError):
        (run_dir / RESERVE).unlink(missing_ok=True)


def check(run_dir: Path, update: int, needed: int) -> None:
    """Raise CannotSave if the disk has less space than a checkpoint needs."""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(run_dir)
        if usage.total and usage.free < needed:  # some network disks report no sizes
            raise cannot_write(f"checkpoint {update}", run_dir, "no space left on the disk", needed, usage.free)


@contextlib.contextmanager
def writing(run_dir: Path, update: int, temporary: Path | None, needed: int) -> Iterator[None]:
    """Remove an unfinished checkpoint, and raise CannotSave if the disk is the reason."""
    try:
        yield
    except BaseException as error:
        if temporary is not None:
            files.remove(temporary)
        reason = reason_of(error)
        if reason is None:
            raise
        raise cannot_write(f"checkpoint {update}", run_dir, reason, needed) from error


def reason_of(error: BaseException) -> str | None:
    """Return why the disk refused, in plain words; None if the error is not about writing.

    torch and safetensors write in C++ and Rust: their errors have the system's number in the text, or none at all.
    """
    if isinstance(error, OSError):
        return _said(error)
    if (number := re.search(r"os error (\d+)", str(error))) is not None:
        return os.strerror(int(number[1]))
    if isinstance(error, RuntimeError) and ("inline_container" in str(error) or "PytorchStreamWriter" in str(error)):
        return "the disk took only a part"
    return None


def cannot_write(what: str, run_dir: Path, reason: str, needed: int | None = None, free: int | None = None) -> CannotSave:
    """Return the single error for an unwritable file of a run, and make room for the result."""
    has = _free(run_dir) if free is None else f", {_size(free)} are free"
    sizes = f" ({_size(needed)} are needed{has})" if needed else has
    release(run_dir)
    last, _ = manifest.newest_valid(run_dir)
    if last is None:
        after = "There is no checkpoint before it: start again, with output_dir on a disk that can be written"
    else:
        after = f"The last checkpoint, {last}, is safe: go on with resume={run_dir} when the disk can be written again"
    return CannotSave(f"{what} could not be written to {run_dir}: {reason}{sizes}. {after}")


def explain(error: BaseException, run_dir: Path) -> str | None:
    """Return the message for a disk error in any part of a run, such as a full disk; None for other errors."""
    if isinstance(error, CannotSave):
        return str(error)
    if not isinstance(error, OSError) or error.errno not in OF_THE_DISK:
        return None
    named = Path(os.fsdecode(error.filename)).name if isinstance(error.filename, str | bytes | Path) else "a file"
    return str(cannot_write(named, run_dir, _said(error)))


def size_of(*values: object) -> int:
    """Return the file bytes of the tensors in nested containers; a DTensor counts as a whole, over all ranks together."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors) + 2**14


def _said(error: OSError) -> str:
    return error.strerror or str(error)


def _free(folder: Path) -> str:
    try:
        found = os.statvfs(folder)
    except (OSError, AttributeError):  # Windows has no such function
        return ""
    if found.f_files and not found.f_favail:
        return ", but the disk may hold no more files: all inodes are in use (see df -i)"
    return f", {_size(found.f_bavail * found.f_frsize)} are free"


def _size(count: int) -> str:
    return f"{count / files.MB:,.1f} MB" if count >= files.MB else f"{count / 1024:,.0f} kB"
