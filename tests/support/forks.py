"""A program that takes every way on which drivetrain forks, on a machine that seems to have two CUDA devices.

Each forked process reports whether CUDA could be used in it, and ends. This process reports each call that would have
started CUDA in it. `python -m tests.support.forks WAY …` takes these ways and writes a JSON object to standard output.

`python -m tests.support.forks stop WAY …` is told to stop on each way, when its forked processes do nothing for ever.
"""

import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from drivetrain.core.machine import forking, nvidia_driver
from drivetrain.core.machine.signals import ended_by_signals
from drivetrain.launch import elastic
from drivetrain.measure.benchmark import interleave
from drivetrain.sweeps import launchers

# The functions by which torch starts CUDA, in any way of asking it.
STARTING = ("_cuda_getDeviceCount", "_cuda_init", "_cuda_setDevice", "_cuda_getDevice", "_cuda_exchangeDevice")
TINY = ("data=digits", "model=mlp", "model.hidden=[8]", "updates=1", "optimizer=adamw", "optimizer.fused=true")
HERE = os.getpid()
started: list[str] = []  # the calls in this process that started CUDA
HERE_IN = Path.cwd()
reports = HERE_IN / "forks"  # one file for each way: a rank of the way before may still write to its own


def train() -> None:
    """The ranks of a run."""
    from drivetrain.launch import launcher

    launcher.launch(launcher.prepare([*TINY, "parallel=ddp"]), quiet=True)


def train_at_start() -> None:
    """The same, told to stop before torch knows of the ranks that it has started."""
    spawn = importlib.import_module("torch.multiprocessing.spawn")  # a function has the same name

    def told_first(*of_ranks: Any) -> Any:
        here, there = socket.socketpair()
        there.setblocking(False)
        before = signal.set_wakeup_fd(there.fileno())
        here.recv(1)
        signal.set_wakeup_fd(before)
        return context(*of_ranks)

    context = spawn.ProcessContext
    with patch.object(spawn, "ProcessContext", told_first):
        train()


def sweep() -> None:
    """The jobs of a sweep, two at a time, each with a device of its own."""
    from drivetrain.sweeps import driver

    words = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "optimizer.lr=0.1,0.2"]
    driver.run([*TINY, *words], quiet=True)


def compare() -> None:
    """The variants of a comparison."""
    from drivetrain.measure.benchmark import compare

    compare.run([*TINY, "precision=fp32,bf16", "rounds=1"])


def ablate() -> None:
    """The variants of an ablation."""
    from drivetrain.measure.benchmark import compare

    compare.ablate([*TINY, "rounds=1"])


def tune() -> None:
    """The variants of a search."""
    from drivetrain.measure.tune import tune

    tune.command([*TINY, "rounds=1"])


def doctor() -> None:
    """The process that profiles a run."""
    from drivetrain.measure.profile import doctor

    doctor.command([*TINY])


def certify() -> None:
    """The process that records a run's first updates."""
    from drivetrain.measure.certify import certify

    certify.command([*TINY, "precision=bf16", "against", "precision=fp32"])


def bisect() -> None:
    """The variants of the comparisons that look for the setting that makes a run slower."""
    from drivetrain.cli import measuring

    measuring.bisect(["precision=fp32", "precision=bf16", *TINY])


WAYS: dict[str, Callable[[], None]] = {
    way.__name__: way for way in (train, train_at_start, sweep, compare, ablate, tune, doctor, certify, bisect)
}


def report(*_: object, **__: object) -> NoReturn:
    """The forked process, in place of what it should do."""
    with open(reports, "a") as file:
        file.write("spoilt\n" if torch.cuda._is_in_bad_fork() else "usable\n")
    os._exit(1)  # torch's launcher would wait for the answer of a rank that ends well


def guarded(name: str, function: Any) -> Any:
    """A function of torch that reports a call in this process."""

    def call(*args: Any) -> Any:
        if os.getpid() == HERE:
            started.append(f"{name}: {traceback.format_stack()[-8:-1]}")
        return function(*args)

    return call


def stay(*_: object, **__: object) -> NoReturn:
    """The forked process, in place of what it should do, until a signal ends it."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a rank would have set its own handlers by now
        signal.signal(number, signal.SIG_DFL)
    with open(reports, "a") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        time.sleep(60)


def fork_into(function: Callable[..., NoReturn]) -> None:
    """Let every forked process call this function."""
    entries = (elastic, "_rank_entry"), (launchers, "run_job"), (interleave, "_child"), (forking, "_child")
    for place, name in entries:
        setattr(place, name, function)


def stop(names: list[str]) -> None:
    """Take the ways, and be told to stop on each of them as soon as it has forked."""
    fork_into(stay)
    out, sys.stdout = sys.stdout, sys.stderr
    tempfile.tempdir = str(Path("temporary").absolute())
    os.mkdir(tempfile.tempdir)
    found: dict[str, Any] = {}
    for name in names:
        _begin(name)
        threading.Thread(target=_stop_when_forked, daemon=True).start()
        ended = "returned"
        try:
            with ended_by_signals():
                WAYS[name]()
        except KeyboardInterrupt:
            ended = "interrupted"
        processes = [pid for pid in reports.read_text().split() if Path(f"/proc/{pid}").exists()]
        found[name] = {"ended": ended, "processes": processes, "files": _left()}
    print(json.dumps(found), file=out, flush=True)


def _begin(name: str) -> None:
    global reports
    reports = HERE_IN / f"forks-{name}"


def _stop_when_forked() -> None:
    while not reports.exists() or not reports.read_text():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


def _left() -> list[str]:
    """Temporary files, and directories that are neither a run's, with its result, nor a sweep's."""
    runs = (lock.parent for lock in Path("outputs").rglob(".lock"))
    unknown = [run for run in runs if not (run / "result.json").exists() and not (run / "jobs.json").exists()]
    return [str(path) for path in [*unknown, *Path(tempfile.gettempdir()).glob("drivetrain*")]]


def main(names: list[str]) -> None:
    nvidia_driver.installed = lambda: True
    nvidia_driver.devices = lambda: nvidia_driver.Devices(2, (9, 0), 99)
    fork_into(report)
    for name in STARTING:
        if hasattr(torch._C, name):
            setattr(torch._C, name, guarded(name, getattr(torch._C, name)))
    found: dict[str, Any] = {}
    out, sys.stdout = sys.stdout, sys.stderr
    for name in names:
        _begin(name)
        ended = "returned"
        try:
            WAYS[name]()
        except Exception as error:  # no forked process did its work
            ended = f"{type(error).__name__}: {error}"
        forks = reports.read_text().split() if reports.exists() else []
        found[name] = {"forks": forks, "started": [*started], "initialized": torch.cuda.is_initialized(), "ended": ended}
        started.clear()
    print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    stop(sys.argv[2:]) if sys.argv[1] == "stop" else main(sys.argv[1:])
