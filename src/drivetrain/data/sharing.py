"""Whether several processes or threads can read one Dataset, and whether its samples have memory of their own."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass

from drivetrain.core.lazy import numpy, torch
from drivetrain.core.machine import open_files
from drivetrain.core.step import trees
from drivetrain.core.step.trees import Tree
from drivetrain.core.user import state as owned

Read = Callable[[int], Tree]  # a sample by its number
WAIT_S = 0.02  # for the other thread's next call: it may wait for this one
MOST_WAITS, MOST_CALLS = 25, 2_000  # of each thread: then both run freely


def between_processes(read: Read, size: int, kept: Mapping[str, object]) -> str | None:
    """Return what forked processes would share of `kept`, so that each gets the other's samples; None: nothing."""
    if found := [f"{name} ({type(value).__name__})" for name, value in owned.walk(kept) if _is_connection(value)]:
        return f"{found[0]} is a connection, which processes cannot share: open it anew where os.getpid() is another one"
    read(0)  # files may be opened at the first read
    before = {number: place for number, place in open_files.positions().items() if not _can_be_opened_again(number)}
    for index in sorted({0, size // 2, size - 1}) if before else ():
        read(index)
    after = open_files.positions()
    for number in (number for number, place in before.items() if after.get(number, place) != place):
        name = next((name for name, value in _files(kept) if _descriptor(value) == number), open_files.name_of(number))
        return f"{name} is an open file whose one position all processes would move: open it for reading only"
    return None


def between_threads(read: Read, size: int, kept: Mapping[str, object]) -> str | None:
    """Read some samples by one thread, then by two that take turns; return what differs and why it may, None: nothing."""
    chosen = sorted({size * n // 4 for n in range(4)})
    try:
        alone = [[read(index) for index in chosen] for _ in range(2)]
    except Exception:  # the run will say so
        return None
    if not _same(*alone):  # such samples are no two times the same
        return None
    half = len(chosen) // 2
    found, errors = _by_turns(read, (chosen[:half], chosen[half:]))
    if not errors and _same(alone[0], found):
        return None
    files = [name for name, _ in _files(kept)]
    why = f" ({', '.join(files)}: open, and all threads move its position)" if files else ""
    failed = f", where {type(errors[0]).__name__} is raised: {errors[0]}" if errors else ", but other ones"
    return f"two threads at once do not read the samples that one reads{failed}{why}"


def _by_turns(read: Read, shares: tuple[Sequence[int], Sequence[int]]) -> tuple[list[Tree], list[Exception]]:
    """Read each share by a thread of its own; after each call of a function the threads change over."""
    found: tuple[list[Tree], list[Tree]] = ([], [])
    errors: list[Exception] = []
    turns, calls, waits, done = threading.Condition(), [0, 0], [0, 0], [False, False]
    both = threading.Barrier(2)

    def change_over(me: int) -> None:
        calls[me] += 1
        if calls[me] > MOST_CALLS or waits[me] > MOST_WAITS:
            return
        with turns:
            turns.notify_all()
            until = calls[1 - me] + 1
            waits[me] += not turns.wait_for(lambda: done[1 - me] or calls[1 - me] >= until, WAIT_S)

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


def _same(some: Sequence[Tree], others: Sequence[Tree]) -> bool:
    one, other = trees.leaves(list(some)), trees.leaves(list(others))
    return len(one) == len(other) and all(map(same, one, other))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and values; NaN is the same as NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _files(kept: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    yield from ((name, value) for name, value in owned.walk(kept) if isinstance(value, io.IOBase | mmap.mmap))


def _descriptor(file: object) -> int:
    with suppress(OSError, ValueError, AttributeError):
        return int(file.fileno())  # type: ignore[attr-defined]
    return -1


def _can_be_opened_again(number: int) -> bool:
    if (new := open_files.opened_again(number)) is None:
        return False
    os.close(new)
    return True


def _is_connection(value: object) -> bool:
    """Return whether it is a connection to another process, such as a database's; sqlite's is to a file."""
    kind = type(value)
    of_database = hasattr(kind, "commit") and (hasattr(kind, "cursor") or hasattr(kind, "execute"))
    return isinstance(value, socket.socket) or (of_database and not kind.__module__.startswith("sqlite3"))


def columns(samples: Sequence[object]) -> Iterator[Sequence[object]]:
    """Yield the parts of samples of one structure, such as all inputs and then all targets."""
    first = samples[0]
    if isinstance(first, Mapping):
        rows = [sample.values() for sample in samples if isinstance(sample, Mapping)]
        parts: Iterator[Sequence[object]] = zip(*rows, strict=False)
    elif is_dataclass(first):
        parts = ([getattr(sample, field.name, None) for sample in samples] for field in fields(first))
    elif isinstance(first, tuple | list):
        parts = zip(*(sample for sample in samples if isinstance(sample, tuple | list)), strict=False)
    else:
        yield samples
        return
    for part in parts:
        yield from columns(part)


def addresses(parts: Sequence[object]) -> list[int]:
    """Return where tensors or arrays are in memory; nothing where they are something else."""
    if isinstance(parts[0], torch.Tensor):
        return [part.data_ptr() for part in parts if isinstance(part, torch.Tensor)]
    if isinstance(parts[0], numpy.ndarray):
        return [part.__array_interface__["data"][0] for part in parts if isinstance(part, numpy.ndarray)]
    return []


def overwritten(read: Callable[[int], object], one: int, other: int) -> bool:
    """Return whether a sample changes when another one is read."""
    before = [part for column in columns([read(one)]) for part in column if addresses([part])]
    copies = [pickle.dumps(part) for part in before]
    read(other)
    return copies != [pickle.dumps(part) for part in before]
