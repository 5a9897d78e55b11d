"""The rows of a stage: each runs in a child, and is written to the stage's JSON file as soon as it is done.

A second call goes on where the first stopped. A row that was killed runs again where it now has more time than it had.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu import children
from bench.gpu.children import Child


@dataclass(frozen=True)
class Row:
    """One thing to run: a function, called in a process of its own, and the seconds that it may take."""

    name: str
    run: Callable[..., dict[str, Any] | None]
    args: tuple[Any, ...] = ()
    limit_s: float = 60.0
    least_s: float = 5.0  # with less time left it is not begun
    keep_output: bool = False  # what it wrote is a result; else it is kept for failures alone


class Campaign:
    """A stage's JSON file, and the time that this call may take."""

    def __init__(self, file: Path, about: dict[str, Any], minutes: float) -> None:
        self.file, self._until = file, time.monotonic() + 60 * minutes
        self.content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": {}}
        self.content |= about
        self._code = code()
        self.hidden = [f"{harness.ROOT}/"]  # places on this machine, which are left out of the file

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows that are done."""
        return self.content["rows"]

    def left_s(self) -> float:
        """Seconds of this call that are left."""
        return self._until - time.monotonic()

    def run(self, rows: Sequence[Row], jobs: int = 1, retry: bool = False) -> list[str]:
        """Run what is open, `jobs` at a time. Return the names of what is still open when the time is over."""
        waiting = [row for row in rows if self._is_open(row, retry)]
        live: dict[str, tuple[Row, Child]] = {}
        try:
            while waiting or live:
                while len(live) < jobs and (row := self._next(waiting)) is not None:
                    live[row.name] = row, Child(row.run, row.args, min(row.limit_s, self.left_s()))
                if not live:
                    break
                time.sleep(children.POLL_S)
                for name, (row, child) in list(live.items()):
                    if (outcome := child.outcome()) is not None:
                        del live[name]
                        self._keep(row, outcome)
        finally:
            for _, child in live.values():
                child.kill()
        return [row.name for row in rows if self._is_open(row, False, row.limit_s)]

    def write(self) -> None:
        """Write the file, at once or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        text = json.dumps(self.content, indent=1)
        for place in self.hidden:
            text = text.replace(place, "")
        new.write_text(text + "\n")
        os.replace(new, self.file)

    def _next(self, waiting: list[Row]) -> Row | None:
        """The next row that there is time for, taken out of `waiting`."""
        row = next((row for row in waiting if row.least_s < self.left_s()), None)
        if row is not None:
            waiting.remove(row)
        return row

    def _is_open(self, row: Row, retry: bool, time_s: float | None = None) -> bool:
        done = self.rows.get(row.name)
        if done is None:
            return True
        if done["status"] == "killed":
            return done["limit_s"] + 1 < min(row.limit_s, self.left_s() if time_s is None else time_s)
        return retry and (done["status"] == "failed" or bool(done.get("failed_arms")))

    def _keep(self, row: Row, outcome: dict[str, Any]) -> None:
        if outcome["status"] == "ok" and not row.keep_output:
            del outcome["output"]
        self.rows[row.name] = {**outcome, "code": self._code}
        self.write()
        why = str(outcome.get("reason") or outcome.get("error") or "").strip().splitlines()
        print(f"{outcome['status']:<8}{outcome['seconds']:7.1f} s  {row.name}  {why[-1][:150] if why else ''}", flush=True)


def chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows whose names match one of the patterns, where * stands for anything and all else for itself."""
    literal = [pattern.replace("[", "[[]") for pattern in patterns]
    return [row for row in rows if any(fnmatch(row.name, pattern) for pattern in literal)]


def code() -> str:
    """Twelve digits that identify the code under test, also where the checkout has no history."""
    digest = hashlib.sha256()
    for folder in ("src/drivetrain", "conf", "recipes"):
        for file in sorted(p for p in (harness.ROOT / folder).rglob("*") if p.suffix in (".py", ".yaml")):
            digest.update(str(file.relative_to(harness.ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The checkout's commit; None where there is no history."""
    command = ["git", "-C", str(harness.ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


MODULES = {  # distribution → module, of what the campaign cannot do without
    "hydra-core": "hydra", "omegaconf": "omegaconf", "antlr4-python3-runtime": "antlr4", "pyyaml": "yaml", "pydantic": "pydantic",
    "annotated-types": "annotated_types", "torch": "torch", "timm": "timm", "numpy": "numpy", "pillow": "PIL", "rich": "rich",
    "safetensors": "safetensors", "scipy": "scipy", "scikit-learn": "sklearn", "torchvision": "torchvision",
}  # fmt: skip
OF_USE = {"plotext": "plotext", "simplejpeg": "simplejpeg"}


def missing(modules: dict[str, str]) -> list[str]:
    """The distributions of these modules that are not installed here."""
    return [distribution for distribution, module in modules.items() if find_spec(module) is None]


def device_facts() -> dict[str, Any]:
    """In a child: what torch says of this machine's device."""
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu", "device_name": "CPU"}
    about = torch.cuda.get_device_properties(0)
    return {
        "device": "cuda", "device_name": about.name, "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count, "capability": f"{about.major}.{about.minor}",
        "cuda": torch.version.cuda, "hip": torch.version.hip, "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip
