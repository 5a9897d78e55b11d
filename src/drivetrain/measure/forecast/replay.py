"""Times operations on this machine, one at a time on tensors of their shapes, and measures what their kernels allocate beside."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_map

from drivetrain.core.device import synchronize
from drivetrain.debug.profile import silence_profiler
from drivetrain.engine.rehearsal.operation import Operation, Spec, is_spec

ENOUGH_S, MOST_TIMES = 0.01, 20  # of repeating one operation
FIRST_SHARE = 0.5  # of the budget: for one call of each operation
MARK = "drivetrain: operation "
FILLED = 0.5  # floating-point inputs: valid for every operation, and no denormal number


class Timed(NamedTuple):
    """What one operation takes here: seconds, and bytes that its kernel allocates beside its results while it runs."""

    seconds: float
    workspace: int


def measure(operations: Sequence[Operation], device: torch.device, budget_s: float) -> dict[str, Timed]:
    """Measure operations in this order until the budget is spent; by signature. What fails by itself is left out."""
    began = time.perf_counter()
    with torch.no_grad():
        workspaces = _workspaces(operations, device, began + FIRST_SHARE * budget_s)
        found = {}
        for operation in operations:
            if operation.signature in workspaces and time.perf_counter() < began + budget_s:
                seconds = _seconds(_call(operation, device), clock(device))
                found[operation.signature] = Timed(seconds, workspaces[operation.signature])
        return found


def clock(device: torch.device) -> Callable[[], float]:
    """With one thread on a CPU its processor time, to which other programs add little; else the time until all is done."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time

    def until_done() -> float:
        synchronize(device)
        return time.perf_counter()

    return until_done


def _seconds(call: Callable[[], Any], now: Callable[[], float]) -> float:
    """The median of several calls; by the wall's clock the shortest, as other programs lengthen some of them."""
    times: list[float] = []
    enough = ENOUGH_S if now is time.thread_time else 5 * ENOUGH_S
    while not times or (sum(times) < enough and len(times) < MOST_TIMES):
        began = now()
        call()
        times.append(now() - began)
    return sorted(times)[len(times) // 2] if now is time.thread_time else min(times)


def _call(operation: Operation, device: torch.device) -> Callable[[], Any]:
    """A function that makes the call, with real arguments."""
    function, args, kwargs = operation.call
    made, named = tree_map(lambda v: _tensor(v, device) if is_spec(v) else v, (args, kwargs), is_leaf=is_spec)
    return lambda: function(*made, **named)


def _tensor(spec: Spec, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    elements = made.untyped_storage().nbytes() // spec.dtype.itemsize
    made.as_strided((elements,), (1,)).fill_(FILLED if spec.dtype.is_floating_point or spec.dtype.is_complex else 0)
    return made


def _workspaces(operations: Sequence[Operation], device: torch.device, until: float) -> dict[str, int]:
    """Call each operation once, which also prepares its kernel; the bytes that it allocates beside its results."""
    if device.type != "cpu":
        return {o.signature: _on_device(o, device) for o in operations if time.perf_counter() < until}
    called: list[Operation] = []
    silence_profiler()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for operation in operations:
            if time.perf_counter() > until:
                break
            try:
                call = _call(operation, device)
                with record_function(MARK + str(len(called))):
                    call()
            except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
                continue
            called.append(operation)
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name().startswith(MARK)}
    return {o.signature: _beside(memory, *spans[MARK + str(n)], o.result_bytes) for n, o in enumerate(called)}


def _beside(memory: list[tuple[int, int]], start: int, end: int, results: int) -> int:
    """The most bytes that were allocated between two times, without the results."""
    now = most = 0
    for _, nbytes in memory[bisect_left(memory, (start, -(1 << 62))) : bisect_right(memory, (end, 1 << 62))]:
        now += nbytes
        most = max(most, now)
    return max(0, most - results)


def _on_device(operation: Operation, device: torch.device) -> int:
    call = _call(operation, device)
    call()
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    call()
    return max(0, torch.accelerator.max_memory_allocated(device) - before - operation.result_bytes)
