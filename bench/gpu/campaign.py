"""The rows of the stages: each runs in a child, and is written to its stage's JSON file as soon as it is done.

A second call goes on where the first stopped. A row that was killed runs again where it now has more time than it had.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu import children
from bench.gpu.children import Child

Rows = dict[str, dict[str, Any]]  # name → what came of it
Summary = Callable[[Rows], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One thing to run: a function, called in a process of its own, and the seconds that it may take."""

    name: str
    run: Callable[..., dict[str, Any] | None]
    args: tuple[Any, ...] = field(default=(), compare=False)
    limit_s: float = 60.0
    least_s: float = 5.0  # with less time left it is not begun
    keep_output: bool = False  # what it wrote is a result; else it is kept for failures alone
    alone: bool = False  # it is timed: nothing else runs beside it
    stage: str = ""


class Campaign:
    """The stages' JSON files in `folder`, each copied to `out` when it changes, and the time that this call may take."""

    def __init__(
        self, folder: Path, device: str, about: Mapping[str, Any], until: float,
        summaries: Mapping[str, Summary] | None = None, out: Path | None = None,
    ) -> None:  # fmt: skip
        self._folders = [folder] if out is None else [folder, out]
        self._device, self._about, self._summaries = device, about, summaries or {}
        self._until = until  # by time.monotonic()
        self._rows: dict[str, Rows] = {}
        self._code = code()
        # Places on this machine, which are left out of the files.
        self.hidden = [f"{harness.ROOT}/", *(f"{place}/" for place in (sys.prefix, sys.base_prefix, sys.exec_prefix))]

    def rows(self, stage: str) -> Rows:
        """The rows of a stage that are done, as the files in both folders have them."""
        if stage not in self._rows:
            files = [file for file in self.files(stage) if file.exists()]
            self._rows[stage] = {name: row for file in files for name, row in json.loads(file.read_text())["rows"].items()}
        return self._rows[stage]

    def files(self, stage: str) -> list[Path]:
        """Where a stage's results are: in the folder that keeps them, and in that which travels."""
        return [folder / f"gpu-{stage}-{self._device}.json" for folder in self._folders]

    def left_s(self) -> float:
        """Seconds of this call that are left."""
        return self._until - time.monotonic()

    def run(self, rows: Sequence[Row], jobs: int = 1, retry: bool = False, threads: int | None = None) -> list[Row]:
        """Run what is open, `jobs` at a time with so many compile threads. Return what is still open when the time is over."""
        waiting = [row for row in rows if self._is_open(row, retry)]
        live: list[tuple[Row, Child]] = []
        try:
            while waiting or live:
                while (row := self._next(waiting, [row for row, _ in live], jobs)) is not None:
                    limit_s = min(row.limit_s, self.left_s())
                    live.append((row, Child(row.run, row.args, limit_s, None if row.alone else threads)))
                if not live:
                    break
                time.sleep(children.POLL_S)
                for row, child in list(live):
                    if (outcome := child.outcome()) is not None:
                        live.remove((row, child))
                        self._keep(row, outcome)
        finally:
            for _, child in live:
                child.kill()
        return [row for row in rows if self._is_open(row, False, row.limit_s)]

    def write(self, stage: str) -> None:
        """Write a stage's files, each at once or not at all."""
        rows = self.rows(stage)
        summary = {"summary": self._summaries[stage](rows)} if stage in self._summaries else {}
        text = json.dumps({"stage": stage, **self._about, "rows": rows, **summary}, indent=1)
        for place in self.hidden:
            text = text.replace(place, "")
        for file in self.files(stage):
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            new.write_text(text + "\n")
            os.replace(new, file)

    def _next(self, waiting: list[Row], live: Sequence[Row], jobs: int) -> Row | None:
        """The next row that there is time and room for, taken out of `waiting`. A timed row runs alone."""
        row = next((row for row in waiting if row.least_s < self.left_s()), None)
        if row is None or (live and (row.alone or live[0].alone or len(live) >= jobs)):
            return None
        waiting.remove(row)
        return row

    def _is_open(self, row: Row, retry: bool, time_s: float | None = None) -> bool:
        done = self.rows(row.stage).get(row.name)
        if done is None:
            return True
        more = done.get("limit_s", row.limit_s) + 1 < min(row.limit_s, self.left_s() if time_s is None else time_s)
        return more or (retry and (done["status"] in ("failed", "killed") or bool(done.get("failed_arms"))))

    def _keep(self, row: Row, outcome: dict[str, Any]) -> None:
        if outcome["status"] == "ok" and not row.keep_output:
            del outcome["output"]
        self.rows(row.stage)[row.name] = {**outcome, "code": self._code}
        self.write(row.stage)
        why = str(outcome.get("reason") or outcome.get("error") or "").strip().splitlines()
        print(f"{outcome['status']:<8}{outcome['seconds']:7.1f} s  {row.name}  {why[-1][:150] if why else ''}", flush=True)


def chosen(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows whose names match a pattern, in the patterns' order; * stands for anything and all else for itself."""
    literal = [pattern.replace("[", "[[]") for pattern in patterns]
    return list(dict.fromkeys(row for pattern in literal for row in rows if fnmatch(row.name, pattern)))


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
    "pydantic-core": "pydantic_core", "typing-inspection": "typing_inspection", "annotated-types": "annotated_types",
    "torch": "torch", "timm": "timm", "numpy": "numpy", "pillow": "PIL", "rich": "rich", "safetensors": "safetensors",
    "scipy": "scipy", "scikit-learn": "sklearn", "torchvision": "torchvision",
}  # fmt: skip
OF_USE = {"plotext": "plotext", "simplejpeg": "simplejpeg", "pytest": "pytest"}


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


# What a device that is lent for half an hour is asked: rows of the other stages, ordered by what their answers are worth. A row
# is written to its own stage's file, so that stage goes on with what is left. docs/gpu.md says how long each part takes.
ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("smoke", (  # does it start?
        "precision=bf16", "compile=inductor", "compile=step", "compile=cudagraph", "compile=regional", "loader=device",
        "loader=resident", "loader=threads", "loader=workers", "precision=amp", "precision=tf32", "precision=bf16_pure",
        "parallel=ddp", "parallel=fsdp", "amp whole step resident", "amp compiled ddp device", "save and resume", "torchrun",
        "optimizer=adamw", "optimizer=adagrad", "optimizer=muon", "optimizer=lamb", "checkpointing=blocks",
        "checkpointing=offload", "augment=[randaugment]",
    )),
    ("right", ("compile=*",)),  # does what it compiles and accumulates train the same?
    ("clock", ("launch-bound eager", "launch-bound whole step", "launch-bound CUDA graph")),  # can its rates be believed?
    ("speed", ("ceilings", "resnet50", "vit_b", "mlp")),  # is it fast?
    ("clock", ("device-bound eager", "device-bound whole step", "resident")),
    ("speed", ("adamw", "small images", "vit_b more", "resnet50 more", "fed", "ladder", "mlp more", "gpt")),
    ("right", ("interrupted", "loader=*", "precision=*")),
    ("verbs", ("compare", "doctor")),
    ("smoke", ("tests marked cuda",)),
)  # fmt: skip
STAGES = tuple(dict.fromkeys(stage for stage, _ in ORDER))


def ordered(rows: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The rows of the lease, out of each stage's."""
    return [row for stage, patterns in ORDER for row in chosen(rows[stage], patterns)]


# --- the compiler's cache, which is kept beside the results where it is small enough to travel with them ---

ARCHIVE = "compiler-cache.tar.gz"
CARRIED = harness.ROOT / ".gpu"  # not of the checkout: what is brought along, wheels too
LARGEST = 16 * 2**20  # bytes of the archive


def cache_folder() -> Path:
    """Where the compiler's cache is in this call; it is filled from the archive that was carried, if one was."""
    folder = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/drivetrain-gpu-{os.getuid()}"))
    if (CARRIED / ARCHIVE).exists() and not folder.exists():
        with tarfile.open(CARRIED / ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
    return folder


def keep_cache(folder: Path, out: Path) -> None:
    """Write the cache to the folder that travels, unless it is too large."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for file in folder.rglob("*"):
            if file.is_file() and file.suffix != ".lock":
                archive.add(file, file.relative_to(folder))
    if packed.tell() > LARGEST:
        print(f"the compiler's cache does not travel: {packed.tell() / 2**20:.0f} MiB packed")
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / ARCHIVE).write_bytes(packed.getvalue())
