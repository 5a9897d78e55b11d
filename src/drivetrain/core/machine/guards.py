"""The limits of a run on this machine. A shared recipe could ask for thousands of processes, or a model larger than the memory.

The limits are far above any useful value. The operator can lift them by DRIVETRAIN_LIMITS=off in the environment; a recipe
cannot.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def values(controller: str, *names: str) -> Iterator[list[str]]:
    """Yield the words in these files of each cgroup that has them. Version 1 has a folder for each controller."""
    with suppress(OSError):
        for line in OWN.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            for group in (path, *PurePosixPath(path).parents):
                with suppress(OSError):
                    folder = MOUNT / controllers / str(group).lstrip("/")
                    yield [word for name in names for word in (folder / name).read_text(encoding="utf-8").split()]


def cgroup_bytes() -> list[int]:
    """The memory limits of these cgroups."""
    found = (*values("memory", "memory.max"), *values("memory", "memory.limit_in_bytes"))
    return [int(limit) for (limit,) in found if limit != "max"]


def cores() -> list[float]:
    """The processor limits of these cgroups, in cores."""
    found = (*values("cpu", "cpu.max"), *values("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return [int(quota) / int(period) for quota, period in found if quota not in ("max", "-1")]


JOBS = "DRIVETRAIN_JOBS_AT_A_TIME"  # in the environment of a sweep's job: the number of jobs that run at a time


def usable_cores(ranks: int | None = None) -> int:
    """The cores for this rank, at least 1: affinity mask and cgroup quota, divided by the machine's ranks and jobs."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks is None else ranks
    return max(1, int(min((here, *cores()))) // (sharing * int(os.environ.get(JOBS, "1"))))


def waited_s() -> tuple[float, float]:
    """Return the seconds for which this process's main thread ran and waited for a core: zeros where unknown."""
    try:
        ran, waited = ([*Path("/proc/self/schedstat").read_text(encoding="ascii").split(), "0", "0"])[:2]
    except OSError:
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


VARIABLE = "DRIVETRAIN_LIMITS"
OF_CORE, FEW = 8, 64  # the limit: this many for each core, or this many in all if that is more
MOST_MODULES = 100_000  # of a model: a thousand modules take about 10 MB in torch
ALL_THE_SAME = f"if it is intended, set {VARIABLE}=off in the environment"


def are_off() -> bool:
    """True if the operator has lifted the limits."""
    return os.environ.get(VARIABLE) == "off"


def too_many(things: str, setting: str, count: int, times: int = 1) -> Iterator[str]:
    """Yield a problem if a setting starts more things than this machine can serve: `count` in each of `times` ranks."""
    if count * times <= FEW or are_off():
        return
    cores = usable_cores(1)
    most = max(FEW, OF_CORE * cores)
    if count * times > most:
        of_ranks = f" in each of {times} ranks" if times > 1 else ""
        cores_here = "1 core" if cores == 1 else f"{cores} cores"
        yield (
            f"{setting} starts {count:,} {things}{of_ranks} on a machine of {cores_here}, where at most {most} are of use: lower "
            f"it; {ALL_THE_SAME}"
        )


def memory_bytes() -> int:
    """The memory of this machine for all its processes, or the cgroup's limit where that is less."""
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return min((os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *cgroup_bytes()))


def device_bytes(device: torch.device) -> int | None:
    """The memory of an accelerator; None for a CPU, or where the device does not report it."""
    try:
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    except (AttributeError, RuntimeError, AssertionError):  # MPS has no such function; a torch without this kind of device
        return None


def numbers_in(shape: Any) -> int:
    """The number of elements in a sample of this shape, summed over its tensors (a dict or a sequence); 0 for None."""
    if shape is None:
        return 0
    if isinstance(shape, Mapping):
        return sum(numbers_in(each) for each in shape.values())
    if all(isinstance(size, int) for size in shape):
        return math.prod(shape)
    return sum(numbers_in(each) for each in shape if not isinstance(each, int))


def too_large(what: str, bytes_: int, setting: str) -> Iterator[str]:
    """Yield a problem if something takes more than this machine's memory."""
    if bytes_ > memory_bytes() and not are_off():
        yield (
            f"{what} take {bytes_ / 2**30:,.3g} GiB, and this machine has {memory_bytes() / 2**30:,.3g} GiB: lower {setting}; "
            f"{ALL_THE_SAME}"
        )


def check_batch(what: str, samples: int, shape: Any, bytes_each: int, ranks: int) -> None:
    """Raise UserError if the inputs of a forward alone take more than this machine's memory, in each of `ranks` ranks."""
    needed = samples * numbers_in(shape) * bytes_each
    if needed * ranks > memory_bytes() and not are_off():
        of_ranks = f" in each of {ranks} ranks" if ranks > 1 else ""
        shown = shape if isinstance(shape, Mapping) else list(shape)
        less = "lower batch.global_batch, or set batch=accumulate and raise batch.accumulation_steps"
        raise UserError(
            f"{what} reads {samples:,} samples of the shape {shown} at once{of_ranks}, which take "
            f"{needed / 2**30:,.3g} GiB, and this machine has {memory_bytes() / 2**30:,.3g} GiB: {less}; {ALL_THE_SAME}"
        )


class ModelTooLarge(UserError):
    """A model is too large to be created."""


@contextmanager
def model_within(
    most_bytes: int, what: str, beside: str = "", where: str = "this machine", counts_meta: bool = False
) -> Iterator[None]:
    """Within the context a model is created. Raises ModelTooLarge once its parameters need more than `most_bytes`.

    `beside` names further uses of memory per parameter, and `where` the memory. Parameters on the meta device,
    which a file of weights may fill, count with `counts_meta`.

    torch fills a parameter only after registering it, so one that is too large is refused before it takes memory.
    """
    from torch.nn.modules import module as hooks
    from torch.nn.parameter import is_lazy

    if are_off():
        yield
        return
    seen: dict[int, torch.Tensor] = {}  # kept alive, so that no other object gets their ids
    modules = total = 0

    def count_parameter(_: object, name: str, parameter: torch.Tensor | None) -> None:
        nonlocal total
        if parameter is None or is_lazy(parameter) or id(parameter) in seen or (parameter.is_meta and not counts_meta):
            return
        seen[id(parameter)] = parameter
        total += parameter.numel() * parameter.element_size()
        if total > most_bytes:
            raise ModelTooLarge(
                f"{what} makes a model of more than {total / 2**30:,.3g} GiB of parameters, and {where} has memory for "
                f"{most_bytes / 2**30:,.3g} GiB of them{beside}: make it smaller; {ALL_THE_SAME}"
            )

    def count_module(*_: object) -> None:
        nonlocal modules
        modules += 1
        if modules > MOST_MODULES:
            raise UserError(f"{what} makes a model of more than {MOST_MODULES:,} modules: make it smaller; {ALL_THE_SAME}")

    handles = [
        hooks.register_module_parameter_registration_hook(count_parameter),
        hooks.register_module_module_registration_hook(count_module),
    ]
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("allocate memory", "size calculation overflowed")):
            raise
        raise UserError(f"{what} makes a model that this machine has no memory for ({error}): make it smaller") from None
    finally:
        for handle in handles:
            handle.remove()
