"""A run's directory: new for every run, locked by one process at a time, and found again after a move."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import UserError
from drivetrain.core.machine import files, process
from drivetrain.core.machine.paths import expanded

if TYPE_CHECKING:
    from drivetrain.core.options import groups


FILES = (  # names written by a run or a sweep into its directory
    "environment.json", "result.json", "jobs.json", "sweep.json", "recipe.yaml", "config.yaml", "metrics.jsonl", "metrics.csv",
    "log.txt", "debug.txt", "report.html", "checkpoints", ".reserve",
)  # fmt: skip

_missing: dict[Path, list[Path]] = {}  # a run's directory → the folders that did not exist before, the deepest first
_kept: dict[Path, set[str] | None] = {}  # a run's directory → its earlier content; None: it did not exist


def new(root: Path, *middle: str) -> Path:
    """The path root/<middle…>/<date>/<time>-<id>, unique even among runs of the same second; it is not created."""
    return root.joinpath(*middle, time.strftime("%Y-%m-%d")) / f"{time.strftime('%H-%M-%S')}-{secrets.token_hex(3)}"


def create(root: Path, *middle: str) -> Path:
    """Create a `new` directory. Raises UserError."""
    path = new(root, *middle)
    make(path)
    return path


def cannot_take(path: Path, word: str, resume: str = "resume") -> Iterator[str]:
    """The reason why a directory given by `word` cannot become a run's: it already holds a run or a run's file."""
    try:
        names = {p.name for p in path.iterdir()} if path.is_dir() else set()
    except OSError as error:
        yield f"{word}={path} cannot be read ({error.strerror}): name another directory"
        return
    if names.intersection(("environment.json", "result.json", "jobs.json")):
        yield f"{word}={path} already holds a run: go on with it by {resume}={path}, or name another directory"
    elif taken := names.intersection(FILES):
        yield f"{word}={path} already has a {min(taken)}, and a run writes one: name another directory"
    elif path.exists() and not path.is_dir():
        yield f"{word}={path} is a file: name a directory"


def make(path: Path, exist_ok: bool = False) -> None:
    """Create a run's directory and its lock file. Raises UserError."""
    remember_missing_folders(path)
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
        files.opened(path / ".lock", "a").close()
    except OSError as error:
        raise UserError(
            f"output_dir: {path} cannot be made ({error.strerror}): set output_dir to a directory you can write to"
        ) from None


def remember_missing_folders(path: Path) -> None:
    """Note the existing content for `remove`: a rank forked from this process may create the rest."""
    _missing[path] = [p for p in (path, *path.parents) if not p.exists()]
    _kept[path] = {p.name for p in path.iterdir()} if path.is_dir() else None


def remove(path: Path) -> None:
    """Remove a run's directory, and empty parent folders created for it.

    In an existing directory, its earlier content and later files of others stay.
    """
    kept = _kept.pop(path, None)
    for entry in [] if kept is None else [path / name for name in (*FILES, ".lock", ".hydra") if name not in kept]:
        files.remove(entry)
    if kept is None:
        files.remove(path)
    for folder in _missing.pop(path, []):
        with contextlib.suppress(OSError):
            folder.rmdir()


def same_on_all_ranks(path: Path, parallel: groups.Parallel) -> Path:
    """Rank 0's directory, on every rank. Raises UserError on all ranks if one of them cannot see it."""
    mark = f".seen-{secrets.token_hex(8)}"
    path, mark = parallel.broadcast_object((path, mark))
    if parallel.world.rank == 0:
        with contextlib.suppress(OSError):  # then no rank sees the file, and all raise
            (path / mark).touch()
    parallel.broadcast_object(None)  # a barrier: the file is there now
    blind = [rank for rank, sees in enumerate(parallel.gather_object((path / mark).exists())) if not sees]
    blind = parallel.broadcast_object(blind)
    if parallel.world.rank == 0:
        (path / mark).unlink(missing_ok=True)
    if blind:
        named = ("rank " if len(blind) == 1 else "ranks ") + ", ".join(map(str, blind))
        raise UserError(
            f"saving.sharded=true lets every rank write its part, but {named} cannot see rank 0's {path}: set output_dir to a "
            "disk that all machines share, or saving.sharded=false"
        )
    return path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a run's directory within the context. Raises UserError if another process has locked it."""
    lock = path / ".lock"
    try:
        opened = files.opened(lock, "a")
    except OSError as error:
        raise UserError(f"{lock} cannot be opened ({error.strerror}): remove it, or copy the run elsewhere") from None
    with opened as file:
        if not files.locks(file):
            raise UserError(f"{path} is in use by another process: wait for it, or start a new run")
        yield


def is_locked(path: Path) -> bool:
    """True if a process has locked the run's directory. Writes nothing; the test itself takes a shared lock for a moment."""
    with contextlib.suppress(OSError), files.opened(path / ".lock", "rb") as file:
        return not files.locks(file, shared=True)
    return False


BEGINS_S = 60.0  # a folder with a hidden name may be one that is not locked yet


@contextlib.contextmanager
def working(place: Path, setting: str = "output_dir") -> Iterator[Path]:
    """Make a new folder below `place`, locked, removed at the end of the context, along with those of killed processes.

    Raises UserError if `place`, named by the setting, cannot be written.
    """
    missing = [path for path in (place, *place.parents) if not path.exists()]
    try:
        place.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".drivetrain-run-", dir=place))
    except OSError as error:
        raise UserError(f"{place} cannot be written ({error.strerror}): set {setting} to a directory you can write to") from None
    _remove_left(place)
    with locked(folder):
        folder = folder.rename(place / folder.name[1:])  # now no other process mistakes it for a leftover
        try:
            yield folder
        finally:
            files.remove(folder)
            for each in (place, Path(tempfile.gettempdir())):
                _remove_left(each)  # of killed children
            for path in missing:
                with contextlib.suppress(OSError):
                    path.rmdir()


def _remove_left(place: Path) -> None:
    for old in (*place.glob("drivetrain-run-????????"), *place.glob(".drivetrain-run-????????")):
        with contextlib.suppress(OSError):  # another process has removed it
            begins = old.name.startswith(".") and process.now() - old.lstat().st_mtime < BEGINS_S
            if not begins and not old.is_symlink() and not is_locked(old):
                files.remove(old)


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """Within the context multiprocessing puts its folders into this new one in TMPDIR."""
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined] # which forked processes inherit
    before = settings.get("tempdir")
    with working(Path(tempfile.gettempdir()), "TMPDIR") as folder:
        settings["tempdir"] = str(folder)
        try:
            yield folder
        finally:
            settings["tempdir"] = before


LAST = "last"  # the word for the newest run below outputs/
TAKE_RUNS = ("resume", "model.weights", "loss.teacher")  # settings that name a run


def named(word: str | Path) -> Path:
    """The run's directory named by a word. Raises UserError for `last` without any run."""
    path = expanded(word)
    if str(word) != LAST or path.exists():
        return path
    if not (found := newest_first(Path("outputs"))):
        raise UserError(f"{LAST} is the newest run below outputs/, and there is none: name a run's directory")
    return found[0]


def with_last(words: Sequence[str]) -> list[str]:
    """Overrides with the newest run's directory instead of `last`. Raises UserError."""
    said = {f"{key}={LAST}": key for key in TAKE_RUNS}
    return [f"{said[word]}={named(LAST)}" if word in said else word for word in words]


def newest_first(root: Path) -> list[Path]:
    """The directories of the runs below `root`, the newest first."""
    return sorted((p.parent for p in root.glob("*/*/environment.json")), key=os.path.getmtime, reverse=True)


GONE = (errno.ENOENT, errno.ENOTDIR)


class RunDirHandle:
    """A run's directory, held by its descriptor, so that it is found after a move."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)) if os.name == "posix" else None
        if self._handle is not None:
            weakref.finalize(self, os.close, self._handle)

    def folder(self) -> Path | None:
        """Return the directory's current path, also after a move; None if it was removed."""
        if self._handle is None:
            return self.path
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._handle)):
                return self.path
        except OSError as error:
            if error.errno not in GONE:  # the disk does not answer: writing will raise the reason
                return self.path
        return self._moved_to(self._handle)

    def place(self) -> Path:
        """Return the current place for the run's files: `folder()` or, if that was removed, a new directory next to it."""
        folder = self.folder()
        if folder is None:
            folder = self.path.with_name(f"{self.path.name}-rescued")
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _moved_to(self, handle: int) -> Path | None:
        try:
            found = Path(_path_of(handle))
            return found if os.path.samestat(os.stat(found), os.fstat(handle)) else None
        except OSError:
            return None


def _path_of(handle: int) -> str:
    """Return the present path of an open directory."""
    import fcntl

    if (get_path := getattr(fcntl, "F_GETPATH", None)) is not None:  # macOS
        return os.fsdecode(fcntl.fcntl(handle, get_path, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{handle}")
