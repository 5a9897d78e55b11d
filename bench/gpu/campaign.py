"""The rows of the stages: each runs in a child, and is written to its stage's JSON file as soon as it is done.

A second call goes on where the first stopped. A row that was killed runs again where it now has more time than it had; one that
reports `open`, because it has too few rounds, goes on from what it has kept.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import harness

POLL_S = 0.02
PR_SET_PDEATHSIG = 1  # of Linux' prctl
LAST_WORDS_S = 0.5  # for a child that is over its time to write where it stands

_to_parent: Connection | None = None  # in a child
_deadline = float("inf")  # in a child: of time.monotonic()
_earlier: Mapping[str, Any] = {}  # in a child


class Child:
    """One running function. `outcome` is asked again and again until the function has ended."""

    def __init__(
        self, run: Callable[..., dict[str, Any] | None], args: tuple[Any, ...], limit_s: float, threads: int | None = None,
        earlier: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        context = get_context("fork")
        self._limit_s, self._began = limit_s, time.monotonic()
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed when it has ended
        self._connection, theirs = context.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        told = (theirs, self._output.fileno(), self._began + limit_s, threads, earlier or {})
        self._process = context.Process(target=_serve, args=(run, args, *told))
        self._process.start()
        theirs.close()
        self.reported: dict[str, Any] = {}  # what it has reported so far

    def outcome(self) -> dict[str, Any] | None:
        """None while it runs; then its status (ok, refused, failed or killed), its figures, and what it wrote."""
        alive = self._process.is_alive()  # asked first: what it sent before its end is in the pipe
        while (message := self._receive()) is not None:
            kind, content = message
            if kind != "report":
                return self._ended(kind, content)
            self.reported |= content
        if not alive:
            return self._ended("failed", {"error": f"the process ended with code {self._process.exitcode} and no result"})
        if time.monotonic() - self._began > self._limit_s:
            self._ask_where_it_stands()
            return self._ended("killed", {"error": f"killed after {self._limit_s:.0f} s", "limit_s": self._limit_s})
        return None

    def kill(self) -> None:
        """End the process and all that it started, stopped ones and those of other process groups too."""
        pid = self._process.pid
        started = harness.descendants(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        for each in started:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self._process.kill()  # where it had no time to found its group
        self._process.join()

    def _ask_where_it_stands(self) -> None:
        """Let the process, and the ranks that it forked, write the lines that they are at."""
        for pid in (self._process.pid, *harness.descendants(self._process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(LAST_WORDS_S)

    def _receive(self) -> Any:
        try:
            return self._connection.recv() if self._connection.poll() else None
        except EOFError:
            return None

    def _ended(self, status: str, content: dict[str, Any]) -> dict[str, Any]:
        self._process.join(5 if status in ("ok", "refused") else 0)  # its workers end with it
        self.kill()
        self._connection.close()
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")
        self._output.close()
        figures = {"status": status, "seconds": round(time.monotonic() - self._began, 2), **self.reported, **content}
        return {**figures, "output": output} if status != "refused" else figures


def report(figures: dict[str, Any]) -> None:
    """In a child: hand over figures now, so that they are kept even if it is killed later."""
    if _to_parent is not None:
        _to_parent.send(("report", figures))


def left_s() -> float:
    """In a child: the seconds until it is killed."""
    return _deadline - time.monotonic()


def earlier() -> Mapping[str, Any]:
    """In a child: what an earlier call with the same code has kept of this row; empty where there was none."""
    return _earlier


def _serve(
    run: Callable[..., Any], args: tuple[Any, ...], connection: Connection, output: int, deadline: float, threads: int | None,
    before: Mapping[str, Any],
) -> None:  # fmt: skip
    global _to_parent, _deadline, _earlier
    from drivetrain.core.errors import UserError
    from drivetrain.core.machine import process

    _to_parent, _deadline, _earlier = connection, deadline, before
    with suppress(PermissionError):
        os.setpgid(0, 0)
    with suppress(AttributeError):  # on Linux it ends with the process that forked it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    # Runs take SIGUSR1 for a wish to stop.
    faulthandler.register(signal.SIGUSR2, sys.stderr)  # no dump_traceback_later: its thread would be forked into ranks
    process.restart_clock()
    if threads is not None:  # of the compiler, beside other children
        import torch._inductor.config

        torch._inductor.config.compile_threads = threads
    try:
        message = "ok", run(*args) or {}
    except UserError as error:
        message = "refused", {"reason": str(error)}
    except BaseException:
        message = "failed", {"error": traceback.format_exc()}
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(message)


# --- in a child: training, and what a row keeps of it ---


class RunFailed(Exception):
    """A run ended otherwise than it should have; the message has its error and its whole log."""


def train(overrides: Sequence[str], attach: Callable[[Any], None] | None = None, ends: str = "completed") -> Any:
    """Train to the end, in this process or in ranks that it forks; the Result. Raises RunFailed, and UserError for a refusal."""
    from drivetrain.launch import launcher

    job = launcher.prepare(list(overrides))
    job.attach = attach
    result = launcher.launch(job, quiet=True)
    if result.status != ends:
        logs = sorted(result.run_dir.glob("**/*.txt")) if result.run_dir is not None else []
        said = [f"== {log.name}\n{log.read_text(errors='replace')}" for log in logs]
        raise RunFailed("\n".join([" ".join(overrides), f"{result.status}: {result.error}", *said]))
    return result


def distinct(words: Sequence[str]) -> list[str]:
    """The overrides, each key once, with the value that it was given last."""
    return list({word.partition("=")[0]: word for word in words}.values())


def facts(result: Any) -> dict[str, Any]:
    """The figures that a row keeps of a run."""
    names = ("updates", "samples_per_second", "step_ms_p50", "compile_s", "peak_memory_bytes", "time_to_first_step_s")
    return {"overrides": result.overrides, "metrics": result.judged("final"), **{name: getattr(result, name) for name in names}}


def losses(run_dir: Path) -> list[float]:
    """The training loss of each record of a run."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["event"] == "train"]


# --- the rows ---

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
        """The files of a stage's results: in the folder that keeps them, and in that which travels."""
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
                    before = self.rows(row.stage).get(row.name, {})
                    before = before if before.get("code") == self._code else {}
                    live.append((row, Child(row.run, row.args, limit_s, None if row.alone else threads, before)))
                if not live:
                    break
                time.sleep(POLL_S)
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
        if done is None or done.get("open"):
            return True
        more = done.get("limit_s", row.limit_s) + 1 < min(row.limit_s, self.left_s() if time_s is None else time_s)
        return more or (retry and (done["status"] in ("failed", "killed") or bool(done.get("failed_variants"))))

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
    # Can its rates be believed? Every step's time is kept.
    ("clock", ("launch-bound eager", "launch-bound whole step", "launch-bound CUDA graph")),
    ("smoke", ("doctor", "compare")),  # do they say what is so?
    # Is it fast? Beside torch's naive loop, one written by hand, and timm's; then a language model with its true head.
    ("speed", ("ceilings", "resnet50 more", "gpt2", "small images", "lora 7b", "jpeg", "jpeg fed", "time to target")),
    ("smoke", (  # does it start?
        "precision=bf16", "compile=inductor", "compile=step", "compile=cudagraph", "compile=regional", "loader=device",
        "loader=resident", "loader=threads", "loader=workers", "precision=amp", "precision=tf32", "precision=bf16_pure",
        "parallel=ddp", "parallel=fsdp", "amp whole step resident", "amp compiled ddp device", "save and resume", "torchrun",
        "optimizer=adamw", "optimizer=adagrad", "optimizer=muon", "optimizer=lamb", "checkpointing=blocks",
        "checkpointing=offload", "augment=[randaugment]",
    )),
    ("right", ("compile=*",)),  # does what it compiles and accumulates train the same?
    ("speed", ("mlp", "vit_b", "resnet50", "fed", "ladder", "vit_b more", "mlp more")),
    ("clock", ("device-bound eager", "device-bound whole step", "resident")),
    ("right", ("interrupted", "loader=*", "precision=*")),
    ("smoke", ("tests marked cuda",)),
)  # fmt: skip
STAGES = tuple(dict.fromkeys(stage for stage, _ in ORDER))


def ordered(rows: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The rows of the lease, out of each stage's."""
    return [row for stage, patterns in ORDER for row in chosen(rows[stage], patterns)]


# --- the compiler's cache, which is kept beside the results where it is small enough to travel with them ---

ARCHIVE = "compiler-cache.tar.gz"  # the first name of its pieces
CARRIED = harness.ROOT / ".gpu"  # not of the checkout: what is brought along, wheels too
LARGEST, PIECES = 16 * 2**20, 2  # bytes of a file that comes back, and the pieces of an archive that travels


def cache_folder() -> Path:
    """The folder of the compiler's cache in this call; it is filled from the archive that was carried, if one was."""
    folder = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/drivetrain-gpu-{os.getuid()}"))
    pieces = sorted(CARRIED.glob(f"{ARCHIVE}.*"))
    if pieces and not folder.exists():
        with tarfile.open(fileobj=io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))) as archive:
            archive.extractall(folder, filter="data")
    return folder


def keep_cache(folder: Path, out: Path) -> None:
    """Write the cache to the folder that travels, unless it is too large."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for file in folder.rglob("*"):
            if file.is_file() and file.suffix != ".lock":
                archive.add(file, file.relative_to(folder))
    if packed.tell() > LARGEST * PIECES:
        print(f"the compiler's cache does not travel: {packed.tell() / 2**20:.0f} MiB packed")
        return
    out.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, packed.tell(), LARGEST)):
        (out / f"{ARCHIVE}.{number}").write_bytes(packed.getvalue()[start : start + LARGEST])
