"""The effects of code on the machine, as Python's audit events tell it: files, folders, processes, sockets, imports."""

import os
import resource
import signal
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import drivetrain
from drivetrain.core.machine import nvidia_driver
from drivetrain.core.machine.paths import conf_dir, recipes_dir

# What may be read: Python, the installed packages, drivetrain with its options and recipes.
PACKAGES = [folder for folder in sys.path if folder.endswith("site-packages")]
ROOTS = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *PACKAGES, *drivetrain.__path__, conf_dir(), recipes_dir()]
HARMLESS = (*dict.fromkeys(os.path.realpath(root) for root in ROOTS), "/proc/self", "/dev/null", "/sys/fs/cgroup")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
LOOKS = ("os.listdir", "os.scandir", "glob.glob", "ctypes.dlopen")
PATHS = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.truncate", "os.chdir")
STARTS = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pty.", "socket.", "shutil.")
OTHERS = (
    "pickle.find_class",
    "tempfile.mkstemp",
    "tempfile.mkdtemp",
    "os.putenv",
    "webbrowser.open",
    "urllib.Request",
    "sqlite3.connect",
    "mmap.__new__",
)
WAITS = 30  # times the processor time: the machine may be busy
LIMIT_S, LIMIT_BYTES = 2, 200 << 20  # of one recipe: processor time, and address space beyond what the process has

_seen: list[list[str]] = []  # of the watches that are open
_allowed: list[str] = []
_writable: list[str] = []
_stopping: list[bool] = []  # whether the first effect is not let happen


class Begins(BaseException):
    """Code that is watched was about to have an effect, and was stopped before it."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen and (effect := _effect(event, arguments)):
        if _stopping[-1] and not effect.startswith(("reads ", *LOOKS)):
            raise Begins(effect)
        _seen[-1].append(effect)
    elif _seen and event == "open" and (arguments[2] or 0) & os.O_NOFOLLOW and _seen[-1][-1:] == [f"reads {arguments[0]}"]:
        _seen[-1].pop()  # `open` told of it before its opener said that a link is not followed


def _effect(event: str, arguments: tuple[Any, ...]) -> str:
    """The effect that an event is, in words; "" for none."""
    if _writable and event in ("open", *PATHS, "shutil.rmtree") and _is_below(arguments[0], _writable):
        return ""
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, int) or (not _writes(mode, flags) and _is_harmless(_opened(path, flags))):
            return ""
        return f"{'writes' if _writes(mode, flags) else 'reads'} {path}"
    if event == "import":
        package = arguments[0].partition(".")[0]
        return f"imports {package}" if package in ("torch", "timm", "torchvision", "datasets", "sklearn") else ""
    if event == "os.listdir" and os.fsdecode(arguments[0] or ".") in sys.path:  # an import looks for its module
        return ""
    if event == "mmap.__new__" and arguments[0] >= 0:
        return "" if _is_harmless(f"/proc/self/fd/{arguments[0]}") else f"maps {os.readlink(f'/proc/self/fd/{arguments[0]}')}"
    if event == "ctypes.dlopen" and arguments[0] == nvidia_driver.LIBRARY:  # ddp has as many ranks as this machine has devices
        return ""
    if event in LOOKS:
        return "" if arguments[0] is None or _is_harmless(arguments[0]) else f"{event} {arguments[0]}"
    return f"{event} {arguments!r:.200}" if event in PATHS + OTHERS or event.startswith(STARTS) else ""


def _writes(mode: Any, flags: Any) -> bool:
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & WRITES)


def _opened(path: Any, flags: Any) -> Any:
    """The path that an opening reads: not what a link there leads to, where it is not followed."""
    if not isinstance(path, str | os.PathLike) or not (flags or 0) & os.O_NOFOLLOW:
        return path
    return Path(path).parent


def _is_harmless(path: Any) -> bool:
    return _is_below(path, (*HARMLESS, *_allowed))


def _is_below(path: Any, roots: Sequence[str]) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):  # a descriptor
        return False
    real = os.path.realpath(os.fsdecode(path)).replace(f"/proc/{os.getpid()}/", "/proc/self/", 1)
    return any(real == root or real.startswith(f"{root}{os.sep}") for root in roots)


@contextmanager
def watched(*readable: Path, writable: Sequence[Path] = (), stopping: bool = False) -> Iterator[list[str]]:
    """A list that is filled with the effects of what runs inside; reading the files and folders `readable` is none.

    Nor is writing below `writable`. With `stopping` the first effect but reading does not happen: it raises Begins.
    """
    if _hook not in _installed:
        sys.addaudithook(_hook)
        _installed.append(_hook)
    _allowed[:] = [os.path.realpath(path) for path in (*readable, *writable)]
    _writable[:] = [os.path.realpath(path) for path in writable]
    _stopping.append(stopping)
    _seen.append([])
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # Python's own, of a module that is imported first here
    try:
        yield _seen[-1]
    finally:
        _seen.pop()
        _stopping.pop()
        sys.dont_write_bytecode = before


_installed: list[Any] = []


class TooLong(BaseException):
    """The code took more than its processor time."""


@contextmanager
def limited(seconds: float = LIMIT_S, memory: int = LIMIT_BYTES) -> Iterator[None]:
    """Stop what runs inside with TooLong after its processor time, and with MemoryError where it takes more memory.

    By the clock it has many times as long: what waits takes no processor time.
    """

    def stop(*_: Any) -> None:
        raise TooLong(f"more than {seconds} s of processor time, or {seconds * WAITS} s by the clock")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_REAL, seconds * WAITS)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def loaded(folders: Sequence[Path]) -> list[str]:
    """The modules that were imported from these folders."""
    below = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return [name for name, file in files if file and os.path.realpath(file).startswith(below)]
