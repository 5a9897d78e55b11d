"""The record of where a run ran: versions, processor, commit, command line. Environment variables are not recorded."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from drivetrain.core import process
from drivetrain.core.lazy import torch
from drivetrain.core.overrides import SECRET
from drivetrain.core.overrides import redact as redact


def describe(overrides: list[str], config_hash: str, machine_local: dict[str, Any]) -> dict[str, Any]:
    """The content of environment.json; `machine_local` are the settings that belong to this machine and not to the recipe."""
    versions = {n: version(n) for n in ("torch", "torchvision", "timm", "hydra-core", "omegaconf", "numpy", "safetensors")}
    return {
        "time": time.time(),  # of the start, or of the latest resume; it orders runs that started in the same second
        "drivetrain": process.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "versions": versions,
        "git_commit": _git_commit(),
        "lock_hash": _lock_hash(),
        "command": [redact(word) for word in sys.argv],
        "overrides": [redact(word) for word in overrides],
        "config_hash": config_hash,
        "machine_local": {k: v for k, v in machine_local.items() if not SECRET.search(k)},
    }


def version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def device_name(device: torch.device) -> str:
    """The device's name, or the processor and its threads. It starts the device: call it only in a process that computes."""
    if device.type == "mps":
        return torch.backends.mps.get_name()
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _git_commit() -> str | None:
    """The git commit of the working directory, with "-dirty" where files differ from it; None outside a repository."""
    # The repository may be a stranger's: its config can name programs that git would start.
    safe = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    command = ["git", *safe, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _lock_hash() -> str:
    """The SHA-256 over names and versions of all installed distributions, its first 16 hex digits."""
    names = sorted({p.name for place in sys.path if place for p in Path(place).glob("*.dist-info")})
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
