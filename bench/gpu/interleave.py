"""Arms that run short blocks in turn, as many of them alive at once as the device's memory holds: two at least.

The first arm is the base, with which all others are compared. Where not all fit, or to begin them takes too long, they run in
groups, the base in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu import children
from bench.harness import Arm

Loop = tuple[Callable[..., None], tuple[Any, ...]]  # a function and its arguments; `sync` is added
WARMUP = 2  # blocks
SPARE = 1.3  # times the memory of the largest arm so far that must be free for one more
MIN_ROUNDS = 2
FILL = 0.4  # of a group's time: when it is over, no further arm begins
NO_TIME = "no time was left to begin it"


@dataclass
class Interleaved:
    """What a row came to."""

    blocks: dict[str, list[float]] = field(default_factory=dict)  # seconds
    base: dict[str, list[float]] = field(default_factory=dict)  # of an arm's group: the base's blocks in the same rounds
    peak_bytes: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # the traceback and all that the arm wrote
    groups: list[list[str]] = field(default_factory=list)


def run(
    loops: dict[str, Loop], rounds: int, seconds: float, folder: Path, free: Callable[[], float],
    on_round: Callable[[Interleaved], None] = lambda _: None,
) -> Interleaved:  # fmt: skip
    """Measure the arms, the first of them the base. `free` tells the bytes of device memory that are free.

    Where `seconds` get short, each group runs fewer rounds, and no other group begins. `on_round` gets what is measured after
    each round. Raises RuntimeError where the base fails.
    """
    found, (base, *waiting), until = Interleaved(), loops, time.monotonic() + seconds
    while waiting and (not found.groups or time.monotonic() < until):
        live: list[Arm] = []
        began = time.monotonic()
        try:
            _begin(base, loops[base], live, found, folder)
            if base in found.failed:
                raise RuntimeError(found.failed[base])
            _fill(live, waiting, loops, found, folder, free, began + FILL * (until - began))
            found.groups.append([arm.name for arm in live])
            share = len(live) / (len(live) + len(waiting))
            _rounds(live, rounds, time.monotonic() + share * (until - time.monotonic()), found, folder, on_round)
        finally:
            for arm in live:
                arm.kill()
    found.failed |= dict.fromkeys(waiting, NO_TIME)
    on_round(found)
    return found


def _fill(
    live: list[Arm], waiting: list[str], loops: dict[str, Loop], found: Interleaved, folder: Path, free: Callable[[], float],
    until: float,
) -> None:  # fmt: skip
    """Begin further arms, the first in any case, the others while there is memory and time."""
    largest, before = 0.0, free()
    while waiting and (len(live) == 1 or (before > SPARE * largest and time.monotonic() < until)):
        name = waiting.pop(0)
        _begin(name, loops[name], live, found, folder)
        if "OutOfMemoryError" in found.failed.get(name, "") and len(live) > 1:  # not by itself beside the base
            del found.failed[name]
            waiting.insert(0, name)
            return
        after = free()
        largest, before = max(largest, before - after), after


def _begin(name: str, loop: Loop, live: list[Arm], found: Interleaved, folder: Path) -> None:
    """Start an arm and warm it up; one that fails is not among the live ones."""
    output = folder / f"{name}.txt"
    output.write_bytes(b"")
    arm = Arm(name, *loop, str(output), method="fork", answers_s=240.0)
    try:
        arm.ready()
        for _ in range(WARMUP):
            arm.block()
        live.append(arm)
    except RuntimeError as error:
        _fail(arm, error, found, folder)


def _rounds(
    live: list[Arm], rounds: int, until: float, found: Interleaved, folder: Path, on_round: Callable[[Interleaved], None]
) -> None:
    base, of_base = live[0], list[float]()
    for arm in live:
        found.base[arm.name] = of_base
    for number in range(rounds):
        if number >= MIN_ROUNDS and time.monotonic() > until:
            break
        for arm in list(live) if number % 2 == 0 else list(reversed(live)):
            try:
                seconds = arm.block()[0]
                found.blocks.setdefault(arm.name, []).append(seconds)
                if arm is base:
                    of_base.append(seconds)
            except RuntimeError as error:
                live.remove(arm)
                _fail(arm, error, found, folder)
        if base not in live:
            raise RuntimeError(found.failed[base.name])
        on_round(found)
    for arm in live:
        found.peak_bytes[arm.name] = arm.stop()["loss_last"]


def _fail(arm: Arm, error: RuntimeError, found: Interleaved, folder: Path) -> None:
    arm.kill()
    found.blocks.pop(arm.name, None)
    found.failed[arm.name] = f"{error}\n{(folder / f'{arm.name}.txt').read_text(errors='replace')}"


def free_memory(device: str) -> Callable[[], float]:
    """Tells the free bytes of the device, asked in a child; of a CPU, of the machine's memory."""
    return lambda: children.call(_free, device)["free"]


def _free(device: str) -> dict[str, Any]:
    import torch

    from drivetrain.loader.resident import free_memory as free

    found = free(torch.device(device))
    return {"free": float("inf") if found is None else found}
