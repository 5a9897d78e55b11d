"""Profiles the time and the memory of a step with torch's profiler."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.lazy import torch
from drivetrain.core.machine import files
from drivetrain.core.machine.csv_rows import csv_rows
from drivetrain.core.options.option import Count, CountOrZero
from drivetrain.core.typed import JsonObject
from drivetrain.debug.window import Window

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEventAvg

PHASES = ("data", "forward", "backward", "update", "evaluate")


class Profile(Window):
    """Runs torch.profiler over a window of updates: a trace for Perfetto, the top operations, and the memory over time.

    Afterwards the run continues at full speed: `updates=…` ends it sooner. Writes profile/ in the run's directory.
    """

    effect = "exact"

    def __init__(
        self,
        skip: CountOrZero = 10,
        warmup: CountOrZero = 2,
        window: Count = 5,
        top: Count = 12,
        memory: bool = True,
        shapes: bool = True,
        stacks: bool = False,
    ) -> None:
        super().__init__(skip, window)
        self.warmup, self.top, self.memory, self.shapes, self.stacks = warmup, top, memory, shapes, stacks
        self._findings: list[str] = []

    def mark(self, name: str) -> AbstractContextManager[object]:
        return torch.profiler.record_function(name)

    @contextmanager
    def record(self, warmup: int, window: int) -> Iterator[Callable[[], None]]:
        silence_profiler()
        first = self._context.progress.updates + warmup + 1
        self._window_title = f"update {first}" if window == 1 else f"updates {first} to {first + window - 1}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if there is no warm-up; a run of one update has none
            schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=window, repeat=1)
        profiler = torch.profiler.profile(
            schedule=schedule,
            on_trace_ready=self._write, record_shapes=self.shapes, profile_memory=self.memory, with_stack=self.stacks,
        )  # fmt: skip
        with profiler:
            yield profiler.step

    def report(self) -> list[str]:
        return self._findings

    def _write(self, profiler: torch.profiler.profile) -> None:
        folder = self._context.run_dir / "profile"
        for name in ("operations.txt", "trace.json", "trace.json.gz", "memory.csv"):
            files.place_for(folder / name)
        averages = profiler.key_averages()
        # A CPU has no device time, and neither has a device unknown to the profiler, such as MPS.
        order = "self_device_time_total" if any(e.self_device_time_total for e in averages) else "self_cpu_time_total"
        (folder / "operations.txt").write_text(
            averages.table(sort_by=order, row_limit=-1, max_name_column_width=80), encoding="utf-8"
        )
        raw = folder / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_text(encoding="utf-8"))
        raw.unlink()
        self._findings += [self._shares(averages), *self._operations(averages, order)]
        if self.memory:
            self._findings += _memory(trace["traceEvents"], folder / "memory.csv", self._context.device.type)
        with gzip.open(folder / "trace.json.gz", "wt") as file:
            json.dump(trace, file)
        self._findings.append(f"{folder}: open trace.json.gz in https://ui.perfetto.dev; operations.txt has every operation")

    def _shares(self, averages: Iterable[FunctionEventAvg]) -> str:
        """Return a line with the host time of an update and the phases' shares of it. Kernels may run asynchronously."""
        # The profiler repeats each range of the host on the device, under the same name and without any host time.
        ranges = {e.key: e for e in averages if e.is_user_annotation and e.device_type == torch._C._autograd.DeviceType.CPU}
        steps = next(e for name, e in ranges.items() if str(name).startswith("ProfilerStep"))
        shares = {p: ranges[p].cpu_time_total / steps.cpu_time_total for p in PHASES if p in ranges}
        shares["rest"] = max(0.0, 1.0 - sum(shares.values()))
        phases = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        return f"profile of {self._window_title}: {steps.cpu_time_total / steps.count / 1e3:.2f} ms each on the host ({phases})"

    def _operations(self, averages: Iterable[FunctionEventAvg], order: str) -> Iterator[str]:
        """Return the operations with the most self time.

        With device time, only the host's operations count, each with the time of its kernels: kernel rows would count it twice.
        """
        on_host = [e for e in averages if e.device_type == torch._C._autograd.DeviceType.CPU]
        times = [(getattr(e, order), e) for e in on_host if not e.is_user_annotation]
        total = sum(time for time, _ in times) or 1.0
        for time, event in sorted(times, key=lambda pair: -pair[0])[: self.top]:
            yield f"  {time / total:6.1%}  {time / 1e3:9.2f} ms  {event.count:6} calls  {event.key}"


def _memory(events: list[JsonObject], file: Path, accelerator: str) -> list[str]:
    """Add the allocated memory to the trace as counters, write it to a file, and return each device's peak and its phase.

    CPU memory is relative to the window's start; accelerator memory, such as "cuda", is all allocated memory.
    """
    ranges = (e for e in events if e.get("cat") == "user_annotation" and e["name"] in PHASES)  # the host's, not the device's
    phases = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in ranges)
    starts = [start for start, _, _ in phases]
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    peaks: dict[str, tuple[int, str]] = {}
    with file.open("w", encoding="utf-8", newline="") as out:
        write_rows = csv_rows(out)
        write_rows([("ms", "device", "allocated_bytes", "change_bytes", "phase")])
        for e in changes:
            args, at = e["args"], e["ts"]
            device = "cpu" if args["Device Type"] == 0 else f"{accelerator}:{args['Device Id']}"
            index = bisect_right(starts, at) - 1
            phase = phases[index][2] if index >= 0 and at <= phases[index][1] else ""
            level = args["Total Allocated"]
            write_rows([(f"{(at - changes[0]['ts']) / 1e3:.3f}", device, level, args["Bytes"], phase)])
            events.append({"ph": "C", "name": f"memory {device}", "pid": e["pid"], "ts": at, "args": {"bytes": level}})
            peaks[device] = max(peaks.get(device, (0, "")), (level, phase))
    return [
        f"memory {device}: at most {level / 2**20:.1f} MiB{' above the start' if device == 'cpu' else ''}, "
        f"in {phase or 'no phase'}; memory.csv has the timeline"
        for device, (level, phase) in peaks.items()
    ]


def silence_profiler() -> None:
    """Silence torch's profiler, which logs each start, and a missing GPU as an error."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
