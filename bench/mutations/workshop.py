"""A copy of the checkout, in which faults are planted and tests run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from bench.mutations.fault import SOURCE, Fault

SEEN, UNSEEN, TIMEOUT = "seen", "unseen", "timeout"
# What every test imports, and what takes long to import. Neither drivetrain nor a test is among them.
IMPORTED = (
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "torchvision", "timm",
    "pytest", "hydra", "omegaconf", "hypothesis", "scipy.stats", "safetensors.torch", "numpy", "yaml", "rich.console",
    "rich.table",
)  # fmt: skip


class Outcome(NamedTuple):
    """What came of a fault: by which test it was seen."""

    outcome: str
    by: str
    seconds: float


class Workshop:
    """Judges faults. Its process has imported torch, and forks one that imports drivetrain and runs the tests for each fault."""

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout

    def __enter__(self) -> Workshop:
        self.root = Path(tempfile.mkdtemp(prefix="mutations-"))
        listed = ["git", "-C", str(self._checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, capture_output=True, check=True).stdout.decode().split("\0"):
            if name and (self._checkout / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._checkout / name, self.root / name)
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONPATH"] = f"{self.root / 'src'}{os.pathsep}{self.root}"
        with contextlib.suppress(ImportError):
            for name in IMPORTED:
                __import__(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def judge(self, fault: Fault, limit_s: float) -> Outcome:
        """Plant one fault, run its tests, and take it out. Raises ValueError where the list does not fit."""
        path = self.root / SOURCE / fault.file
        text = path.read_text(encoding="utf-8")
        self._write(path, fault.plant(text))
        try:
            began = time.monotonic()
            code, failed = self._run([*fault.tests.split(), *(["-k", fault.only] if fault.only else [])], limit_s)
            seconds = round(time.monotonic() - began, 1)
        finally:
            self._write(path, text)
        if code is None:
            return Outcome(TIMEOUT, "", seconds)
        if code not in (0, 1, 2):  # 2: a test file cannot be imported
            raise ValueError(f"{fault.name}: pytest {fault.tests} -k {fault.only!r} ends with exit code {code}: no such tests?")
        return Outcome(SEEN if code else UNSEEN, failed[0] if failed else "", seconds)

    def failing_without_fault(self, tests: Sequence[str], limit_s: float = 3600.0) -> list[str]:
        """Return which of these tests fail in the source as it is."""
        found: list[str] = []
        for begin in range(0, len(tests), 20):  # several processes, so that no test fails by the memory of the others
            code, failed = self._run(["--maxfail=1000", *tests[begin : begin + 20]], limit_s)
            found += failed if code in (0, 1) else [f"pytest ends with exit code {code}: {tests[begin : begin + 20]}", *failed]
        return found

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Write a file. What was compiled of it goes: a change within one second that keeps the size would not be seen."""
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _run(self, words: Sequence[str], limit_s: float) -> tuple[int | None, list[str]]:
        """Run pytest in a forked process. Return its exit code, None after the limit, and the tests that failed."""
        answer = self.root / "answer.json"
        answer.unlink(missing_ok=True)
        sys.stdout.flush()
        if not (pid := os.fork()):
            self._serve(words, answer)
        until, status = time.monotonic() + limit_s, None
        while status is None and time.monotonic() < until:
            done, found = os.waitpid(pid, os.WNOHANG)
            status = found if done else None
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # the group: ranks and workers too
        if status is None:
            os.waitpid(pid, 0)
            return None, []
        if not answer.exists():  # the process died: the tests would have seen that
            return 1, [f"the tests' process ended by signal {os.waitstatus_to_exitcode(status)}"]
        content = json.loads(answer.read_text(encoding="utf-8"))
        return content["code"], content["failed"]

    def _serve(self, words: Sequence[str], answer: Path) -> NoReturn:
        os.setpgid(0, 0)
        os.chdir(self.root)
        log = os.open(self.root / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # The copy's source in place of the checkout's, whose virtual environment stays.
        others = [p for p in sys.path if p.startswith(sys.prefix) or not p.startswith(str(self._checkout))]
        sys.path[:] = [str(self.root / "src"), str(self.root), *others]
        for name in [n for n in sys.modules if n.partition(".")[0] in ("bench", "tests", "drivetrain")]:
            del sys.modules[name]
        import pytest

        failures = _Failures()
        code = pytest.main(["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *words], plugins=[failures])
        answer.write_text(json.dumps({"code": int(code), "failed": failures.names}), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)


class _Failures:
    """A plugin of pytest that keeps the names of the tests that failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.names.append(report.nodeid)


def problems(faults: Iterable[Fault], source: Path) -> list[str]:
    """Return what does not fit the source any more: a text that is not there once, a test file that is gone, a name twice."""
    found, names = [], set()
    for fault in faults:
        try:
            fault.plant((source / SOURCE / fault.file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            found.append(str(error))
        found += [f"{fault.name}: there is no {test}" for test in fault.tests.split() if not (source / test).exists()]
        found += [f"{fault.name}: two faults of one name"] if fault.name in names else []
        names.add(fault.name)
    return found
