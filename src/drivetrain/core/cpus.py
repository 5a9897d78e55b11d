"""The number of CPU cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

from drivetrain.core import cgroup

JOBS = "DRIVETRAIN_JOBS_AT_A_TIME"  # in the environment of a sweep's job: the number of jobs that run at a time


def usable_cores(ranks: int | None = None) -> int:
    """The cores for this rank, at least 1: affinity mask and cgroup quota, divided by the machine's ranks and jobs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = int(min((cores, *cgroup.cores())))
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks is None else ranks
    return max(1, cores // (sharing * int(os.environ.get(JOBS, "1"))))


def waited_s() -> tuple[float, float]:
    """Return the seconds that this process's main thread has run, and those that it waited for a core: zeros where unknown."""
    try:
        ran, waited = ([*Path("/proc/self/schedstat").read_text(encoding="ascii").split(), "0", "0"])[:2]
    except OSError:
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9
