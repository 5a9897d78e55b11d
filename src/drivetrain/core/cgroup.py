"""The limits of this process's control groups (Linux): of its own and of each one above it, in both of the kernel's interfaces.

A container's own group may lie below the mount (`/sys/fs/cgroup`), or be the mount itself while /proc tells its path on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def values(controller: str, *names: str) -> Iterator[list[str]]:
    """Yield the words in these files of each group that has them. Version 1 has a folder for each controller."""
    with suppress(OSError):
        for line in OWN.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            for group in (path, *PurePosixPath(path).parents):
                with suppress(OSError):
                    folder = MOUNT / controllers / str(group).lstrip("/")
                    yield [word for name in names for word in (folder / name).read_text(encoding="utf-8").split()]


def memory_bytes() -> list[int]:
    """The limits of memory that these groups set."""
    found = (*values("memory", "memory.max"), *values("memory", "memory.limit_in_bytes"))
    return [int(limit) for (limit,) in found if limit != "max"]


def cores() -> list[float]:
    """The limits of processor time that these groups set, in cores."""
    found = (*values("cpu", "cpu.max"), *values("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return [int(quota) / int(period) for quota, period in found if quota not in ("max", "-1")]
