"""Whether several processes or threads can read one Dataset, and whether its samples have their own memory."""

from __future__ import annotations

import io
import os
import pickle
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from multiprocessing import connection, synchronize, util
from pathlib import Path
from socket import socket
from subprocess import Popen

from drivetrain.core.lazy import numpy, torch
from drivetrain.core.machine import open_files
from drivetrain.core.step import trees
from drivetrain.core.step.trees import Tree
from drivetrain.core.user import state as owned

Read = Callable[[int], Tree]  # a sample by its number
WAIT_S = 0.005  # for the other thread's next call, before it is looked whether that thread waits itself
MOST_WAITS, MOST_CALLS = 25, 2_000  # of each thread: then both run freely


def between_processes(read: Read, size: int, kept: Mapping[str, object]) -> str | None:
    """Return what forked processes would share of `kept`, so that each gets the other's samples; None: nothing."""
    if found := _connection(kept, threads=False):
        return f"{found} is a connection, which processes cannot share: open it anew where os.getpid() is another one"
    read(0)  # files may be opened at the first read
    before = {number: place for number, place in open_files.positions().items() if not _can_be_opened_again(number)}
    for index in sorted({0, size // 2, size - 1}) if before else ():
        read(index)
    after = open_files.positions()
    for moved in (number for number, place in before.items() if after.get(number, place) != place):
        name = next((name for name, number in _files(kept) if number == moved), os.path.realpath(f"/dev/fd/{moved}"))
        return f"{name} is an open file whose one position all processes would move: open it for reading only"
    return None


def between_threads(read: Read, size: int, kept: Mapping[str, object]) -> str | None:
    """Read some samples by one thread, then by two that take turns; return what differs and why it may, None: nothing."""
    if found := _connection(kept, threads=True):
        return f"{found} is a connection without a lock: all threads would use it at once"
    chosen = sorted({size * n // 4 for n in range(4)})
    try:
        alone = [[read(index) for index in chosen] for _ in range(2)]
    except Exception:  # the run will say so
        return None
    if not owned.same(*map(trees.leaves, alone)):  # such samples are no two times the same
        return None
    half = len(chosen) // 2
    shared, errors = _by_turns(read, (chosen[:half], chosen[half:]))
    if not errors and owned.same(*map(trees.leaves, (alone[0], shared))):
        return None
    files = [name for name, _ in _files(kept)]
    why = f" ({', '.join(files)}: open, and all threads move its position)" if files else ""
    failed = f", where {type(errors[0]).__name__} is raised: {errors[0]}" if errors else ", but other ones"
    return f"two threads at once do not read the samples that one reads{failed}{why}"


def _by_turns(read: Read, shares: tuple[Sequence[int], Sequence[int]]) -> tuple[list[Tree], list[Exception]]:
    """Read each share by its own thread; after each call of a function the threads change over.

    Even on a busy machine a thread continues only when the other one has made its next call, or waits, for example for a lock.
    """
    found: tuple[list[Tree], list[Tree]] = ([], [])
    errors: list[Exception] = []
    turns, both, calls, waits, done = threading.Condition(), threading.Barrier(2), [0, 0], [0, 0], [False, False]

    def change_over(me: int) -> None:
        calls[me] += 1
        if calls[me] > MOST_CALLS or waits[me] > MOST_WAITS:
            return
        with turns:
            turns.notify_all()
            until = calls[1 - me] + 1
            while not turns.wait_for(lambda: done[1 - me] or calls[1 - me] >= until, WAIT_S):
                if _waits(threads[1 - me]):
                    waits[me] += 1
                    return

    def work(me: int) -> None:
        both.wait()
        sys.setprofile(lambda *_: change_over(me))
        try:
            found[me].extend(read(index) for index in shares[me])
        except Exception as error:
            errors.append(error)
        finally:
            sys.setprofile(None)
            with turns:
                done[me] = True
                turns.notify_all()

    threads = [threading.Thread(target=work, args=(number,), daemon=True, name="reads by turns") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [*found[0], *found[1]], errors


def _waits(thread: threading.Thread) -> bool:
    """True if a thread waits for anything but a CPU core or a disk. Only Linux shows it: True elsewhere."""
    with suppress(OSError):
        return Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "S"
    return True


def _files(kept: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """Yield the open files that an object keeps, by name, and their descriptors."""
    for name, value in owned.walk(kept):
        if isinstance(value, io.IOBase):
            with suppress(OSError, ValueError):
                yield name, value.fileno()


def _can_be_opened_again(number: int) -> bool:
    if (new := open_files.opened_again(number)) is None:
        return False
    os.close(new)
    return True


def _connection(kept: Mapping[str, object], threads: bool) -> str | None:
    """Return a connection, such as a database's, that is kept without a lock of its owner's; None: there is none.

    What a threading.local keeps is each thread's own, and what multiprocessing's keeps is each process's too.
    """
    apart = threading.local if threads else util.ForkAwareLocal
    found = dict(owned.walk(kept, into=lambda value: not isinstance(value, apart | Popen)))
    owners = []
    for name, value in found.items():
        if isinstance(value, synchronize.SemLock) or (threads and hasattr(type(value), "acquire")):
            owner = name.rpartition(".")[0]
            while isinstance(found.get(owner), dict | list | tuple):
                owner = owner.rpartition(".")[0]
            owners.append(f"{owner}.")
    for name, value in found.items():
        if _asks_another(value, threads) and not f"{name}.".startswith((*owners,)):
            return f"{name} ({type(value).__name__})"
    return None


def _asks_another(value: object, threads: bool) -> bool:
    """Return whether it is a connection to a process or a database; sqlite's is to a file."""
    kind = type(value)
    if isinstance(value, io.IOBase):
        with suppress(OSError, ValueError):
            mode = os.fstat(value.fileno()).st_mode
            return value.fileno() > 2 and value.readable() and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))
    of_database = hasattr(kind, "execute") or hasattr(kind, "cursor")
    of_database &= hasattr(kind, "commit") or hasattr(kind, "fetchone")
    of_database &= threads or not kind.__module__.startswith("sqlite3")
    return of_database or isinstance(value, socket | Popen | connection.Connection)


def arrays(sample: object) -> list[torch.Tensor | numpy.ndarray]:
    """Return the tensors and arrays of a sample."""
    if isinstance(sample, torch.Tensor):
        return [sample] if sample.layout is torch.strided else []
    if isinstance(sample, numpy.ndarray):
        return [sample]
    parts = vars(sample) if is_dataclass(sample) else sample
    parts = list(parts.values()) if isinstance(parts, Mapping) else parts
    return [found for part in parts for found in arrays(part)] if isinstance(parts, tuple | list) else []


def address(array: torch.Tensor | numpy.ndarray) -> int:
    """Return where its first number is in memory."""
    return int(array.data_ptr() if isinstance(array, torch.Tensor) else array.__array_interface__["data"][0])


def overwritten(read: Callable[[int], object], one: int, other: int) -> bool:
    """Return whether a sample changes when another one is read."""
    before = arrays(read(one))
    copies = [pickle.dumps(part) for part in before]
    read(other)
    return copies != [pickle.dumps(part) for part in before]
