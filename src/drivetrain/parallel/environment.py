"""Reads rank and world size from the environment that torchrun or Slurm sets. Does not import torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

from drivetrain.core.errors import refuse
from drivetrain.core.world import World

PORTS = range(20_000, 30_000)  # MASTER_PORT of a Slurm step is one of these, by the step's number


def launched() -> int | None:
    """Return the number of ranks that torchrun or Slurm started, this one included; None if neither did."""
    environ = _slurm_environment(os.environ) or os.environ
    size = environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() and "RANK" in environ else None


def world_of_environment() -> World:
    """Return this process's world as torchrun or Slurm set it; a single process if neither did. Raises UserError."""
    slurm = _slurm_environment(os.environ)
    environ = slurm or os.environ
    # Launchers that name no local rank, such as a PyTorchJob's, start one process in each container.
    together = environ.get("WORLD_SIZE", "1") if "LOCAL_RANK" in environ else "1"
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": together}
    values = {name: environ.get(name, default) for name, default in defaults.items()}
    refuse(
        f"{name}={value} in the environment is not a number: a launcher sets it, otherwise unset it"
        for name, value in values.items()
        if not value.isdecimal()
    )
    if launched() is None:
        return World()
    if slurm is not None:
        os.environ.update(slurm)
    return World(*map(int, values.values()))


def _slurm_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return torchrun's variables for a task of a Slurm step (srun); None outside of one, or if the step is a single task.

    A batch script itself is not a step: it has SLURM_NTASKS, but its tasks are not started.
    """
    size = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environ or "SLURM_PROCID" not in environ or not size.isdecimal() or int(size) < 2:
        return None
    step = int(environ.get("SLURM_JOB_ID", "0")) * 7 + int(environ.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"], "WORLD_SIZE": size, "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(_tasks_of_node(environ)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", "localhost")),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(PORTS[step % len(PORTS)]),
    }  # fmt: skip


def _tasks_of_node(environ: Mapping[str, str]) -> int:
    """Return the tasks on this node: entry number SLURM_NODEID of a list such as "2(x3),1"."""
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1")):
        counts += [int(tasks)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else counts[0]


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's compressed list, such as "gpu[03-05,7],login", by scontrol if there is one."""
    try:
        result = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=10)
        return result.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        prefix, _, rest = nodes.partition("[")
        return prefix.split(",")[0] + re.split(r"[-,\]]", rest)[0] if rest and "," not in prefix else prefix.split(",")[0]
