"""Where a run ran: versions, device, commit, command line. No variable of the environment is written."""

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

_SECRET = re.compile(r"(api_?key|token|secret|password)$", re.I)


def describe(overrides: list[str], config_hash: str, operator: dict[str, Any]) -> dict[str, Any]:
    """The content of environment.json."""
    versions = {n: version(n) for n in ("torch", "torchvision", "timm", "hydra-core", "omegaconf", "numpy", "safetensors")}
    return {
        "time": time.time(),  # when the run began or was gone on with; folders of one second are told apart by it
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
        "operator": {k: v for k, v in operator.items() if not _SECRET.search(k)},
    }


def redact(override: str) -> str:
    """An override with the value of a key, token, secret or password left out."""
    key, equals, _ = override.partition("=")
    return f"{key}=<redacted>" if equals and _SECRET.search(key) else override


def version(name: str) -> str | None:
    """Of an installed distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def device_name(device: torch.device) -> str:
    """The device as a person knows it. Asked only in a process that computes: it starts CUDA."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _git_commit() -> str | None:
    """The commit of the folder the run was started in; it ends in -dirty where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _lock_hash() -> str:
    """SHA-256 over the installed distributions' names and versions, as their folders have them."""
    names = sorted({p.name for place in sys.path if place for p in Path(place).glob("*.dist-info")})
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
