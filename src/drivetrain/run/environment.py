"""The record of a run's environment: versions, processor, commit, command line. Environment variables are not recorded."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from functools import cache, lru_cache
from glob import glob
from importlib import metadata
from pathlib import Path

from drivetrain.core.lazy import torch
from drivetrain.core.machine import process
from drivetrain.core.options.overrides import SECRET
from drivetrain.core.options.overrides import redact as redact
from drivetrain.core.typed import JsonObject


def describe(overrides: list[str], config_hash: str, machine_local: dict[str, object]) -> JsonObject:
    """The content of environment.json; `machine_local` are settings of this machine, not of the recipe."""
    versions = {n: version(n) for n in ("torch", "torchvision", "timm", "hydra-core", "omegaconf", "numpy", "safetensors")}
    return {
        "time": time.time(),  # of the start or the latest resume; it orders runs of the same second
        "drivetrain": process.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "versions": versions,
        "git_commit": _git_commit(),
        "lock_hash": _lock_hash(tuple(sys.path)),
        "command": [redact(word) for word in sys.argv],
        "overrides": [redact(word) for word in overrides],
        "config_hash": config_hash,
        "machine_local": {k: v for k, v in machine_local.items() if not SECRET.search(k)},
    }


@lru_cache(maxsize=64)  # 5 ms each, to parse all of its metadata
def version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name. Different kinds can have one name, so family and model follow if Linux reports them."""
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    facts = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", about, re.M))
    name = facts.get("model name", platform.processor())
    return f"{name} (family {facts['cpu family']}, model {facts['model']})" if {"cpu family", "model"} <= facts.keys() else name


def device_name(device: torch.device) -> str:
    """The device's name, or the processor and its threads. It starts the device: call it only in a process that computes."""
    if device.type == "mps":
        return torch.backends.mps.get_name()
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}"


def _git_commit() -> str | None:
    """The git commit of the working directory, with "-dirty" if files differ from it; None outside a repository."""
    here = Path.cwd()
    if "GIT_DIR" not in os.environ and not any((folder / ".git").exists() for folder in (here, *here.parents)):
        return None  # a quick search, as starting git takes longer
    # The repository may be a stranger's: its config can name programs that git would start.
    off = {"core.fsmonitor": "false", "core.hooksPath": os.devnull}
    try:
        commit = _git(["rev-parse", "--verify", "-q", "HEAD"], off)
        found = _git(["config", "--show-scope", "--name-only", "-z", "--get-regexp", r"^filter\."], off, may_fail=True).split(
            "\0"
        )
        own = [key for scope, key in zip(found[::2], found[1::2], strict=False) if scope in ("local", "worktree")]
        off |= {key: "false" if key.endswith(".required") else "" for key in own}  # filters that read a changed file
        changed = _git(["status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty"], off)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return commit.strip() + ("-dirty" if changed else "")


def _git(words: list[str], settings: dict[str, str], may_fail: bool = False) -> str:
    """The output of git, without network. Raises OSError, SubprocessError, and ValueError for output that is not UTF-8."""
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)  # after the operator's own
    env = {**os.environ, "GIT_ALLOW_PROTOCOL": "none", "GIT_OPTIONAL_LOCKS": "0"}
    for number, (key, value) in enumerate(settings.items(), first):
        env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value, "GIT_CONFIG_COUNT": str(number + 1)}
    return subprocess.run(["git", *words], env=env, capture_output=True, encoding="utf-8", timeout=5, check=not may_fail).stdout


@cache
def _lock_hash(places: tuple[str, ...]) -> str:
    """The first 16 hex digits of the SHA-256 over names and versions of all installed distributions."""
    names = sorted({name for place in places if place for name in glob("*.dist-info", root_dir=place)})
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
