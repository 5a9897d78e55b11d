"""A run's directory: a new one for every run, held by one process at a time."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.core.errors import UserError

_made: dict[Path, list[Path]] = {}  # run's directory → the folders made for it, the deepest first


def new(root: Path, *middle: str) -> Path:
    """root/<middle…>/<date>/<time>-<id>/, another one even for runs that start in the same second; not made yet."""
    return root.joinpath(*middle, time.strftime("%Y-%m-%d")) / f"{time.strftime('%H-%M-%S')}-{secrets.token_hex(3)}"


def create(root: Path, *middle: str) -> Path:
    """A `new` directory, made. Raises UserError."""
    path = new(root, *middle)
    make(path)
    return path


def make(path: Path) -> None:
    """Make a run's directory. Raises UserError where that cannot be."""
    may_be_made(path)
    try:
        path.mkdir(parents=True)
        (path / ".lock").touch()
    except OSError as error:
        raise UserError(
            f"output_dir: {path} cannot be made ({error.strerror}): set output_dir to a directory you can write to"
        ) from None


def may_be_made(path: Path) -> None:
    """Note which folders there are not yet, for `remove`: a rank that is forked from this process may make the directory."""
    _made[path] = [p for p in (path, *path.parents) if not p.exists()]


def remove(path: Path) -> None:
    """Remove a run's directory, and the folders above it that were made for it and hold nothing else."""
    shutil.rmtree(path, ignore_errors=True)
    for folder in _made.pop(path, []):
        with contextlib.suppress(OSError):
            folder.rmdir()


def of_all(path: Path, parallel: Any) -> Path:
    """Rank 0's directory, on every rank. Raises UserError, on all of them, where a rank does not see it."""
    mark = f".seen-{secrets.token_hex(8)}"
    path, mark = parallel.broadcast_object((path, mark))
    if parallel.world.rank == 0:
        with contextlib.suppress(OSError):  # then no rank sees it, and all of them end
            (path / mark).touch()
    parallel.broadcast_object(None)  # it is there now
    blind = [rank for rank, sees in enumerate(parallel.gather_object((path / mark).exists())) if not sees]
    blind = parallel.broadcast_object(blind)
    if parallel.world.rank == 0:
        (path / mark).unlink(missing_ok=True)
    if blind:
        named = ("rank " if len(blind) == 1 else "ranks ") + ", ".join(map(str, blind))
        raise UserError(
            f"saving.sharded=true lets every rank write its part, and {named} cannot see rank 0's {path}: set output_dir to a "
            "disk that all machines share, or saving.sharded=false"
        )
    return path


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a run's directory. Raises UserError while another process holds it."""
    lock = path / ".lock"
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is in use by another process: wait for it, or start a run of its own") from None
        yield


def is_held(path: Path) -> bool:
    """Whether a process holds the run's directory now. A look that writes nothing and keeps nobody out but for its moment."""
    try:
        import fcntl

        with (path / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # no such locks here, or no such file
        return False
    return False


def newest_first(root: Path) -> list[Path]:
    """The runs below root, the newest first."""
    return sorted((p.parent for p in root.glob("*/*/environment.json")), key=os.path.getmtime, reverse=True)
