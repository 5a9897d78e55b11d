"""Whatever starts runs, and however it is stopped or killed: nobody of it lives on, and what had saved goes on."""

import itertools
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from tests.support import command
from tests.support.waiting import until

MARK = "DRIVETRAIN_TEST_MARK"  # in the environment of all that a command starts
RUN = (
    "data=digits", "model=mlp", "runtime.device=cpu", "batch.global_batch=64", "log_every=1", "saving.every_updates=2",
    "epochs=100000",
)  # fmt: skip
DDP, FSDP = (("parallel=" + name, "parallel.nproc=2") for name in ("ddp", "fsdp"))
WORKERS, THREADS = (("loader=" + name,) for name in ("workers", "threads"))
IN_A_FORK = """
import multiprocessing, sys
import drivetrain
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=drivetrain.train, args=(sys.argv[1:],), daemon=True)
    process.start()
    process.join()
"""
TRAIN, SWEEP = ("train",), ("train", "-m", "optimizer=sgd,adamw")
COMPARE, ABLATE = ("compare", "optimizer=sgd,adamw"), ("ablate", "recipe=digits_fast", "baseline=naive", "rounds=9")
TUNE, DOCTOR, FORK = ("tune", "what=lr"), ("doctor",), ("fork",)
WAYS = ((), DDP, FSDP, WORKERS, THREADS)
HOWS = ("INT", "TERM", "KILL", "KILL the first child", "KILL the last child")  # a launcher; a rank, or a loader's worker
CASES = [
    *itertools.product((TRAIN, SWEEP, FORK), WAYS, HOWS),
    *itertools.product((COMPARE, TUNE, DOCTOR), WAYS, HOWS[:3]),
    *itertools.product((ABLATE,), [way for way in WAYS if way is not FSDP], HOWS[:3]),  # its baseline refuses fsdp
]
LOSS = """
import os, time
from pathlib import Path
import torch

class Loss(torch.nn.Module):
    calls = 0
    def forward(self, output, y):
        self.calls += 1
        if not torch.is_grad_enabled():
            self.now("evaluating")
        return torch.nn.functional.cross_entropy(output, y)
    def state_dict(self, *args, **kwargs):
        if self.calls > 8:  # not where the run tries what can be saved
            self.now("saving")
        return super().state_dict(*args, **kwargs)
    def now(self, moment):
        Path("moments", moment).touch()
        time.sleep(0.2)
"""
MARKED = ("loss=own", "loss.target=marked.Loss", "trust=[marked]")
AIMED = [*itertools.product((TRAIN, SWEEP), WAYS, HOWS)]


@pytest.fixture(autouse=True)
def _heeds_ctrl_c():
    """A shell's background job is told to ignore SIGINT, and so would be what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def living(mark: str) -> dict[int, str]:
    """The processes that have this mark in their environment, and what they run: those that have ended are none."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.slow
@pytest.mark.own_process  # whose environment /proc tells
@pytest.mark.parametrize("moment", ["starting", "running"])
@pytest.mark.parametrize(
    ("verb", "words", "how"), CASES, ids=lambda each: each if isinstance(each, str) else " ".join(each) or "-"
)
def test_nobody_lives_on(tmp_path, verb, words, how, moment):
    mark = uuid.uuid4().hex
    (tmp_path / "program.py").write_text(IN_A_FORK)
    of_its_own = {"ablate": ("data=", "model="), "tune": ("epochs=",)}.get(verb[0], ())
    given = [*(verb if verb is not FORK else ()), *(word for word in RUN if not word.startswith(of_its_own)), *words]
    process = command.start(*given, cwd=tmp_path, how=["program.py"] if verb is FORK else command.DRIVETRAIN, env={MARK: mark})
    try:
        if moment == "starting":
            until(lambda: process.pid in living(mark))
        elif verb[0] in ("train", "fork"):
            until(lambda: found(tmp_path, "metrics.jsonl"))
        else:
            until(lambda: len(living(mark)) > 1)
        stop(process, how, mark)
    finally:
        for other in living(mark):
            os.kill(other, signal.SIGKILL)


def stop(process: subprocess.Popen[str], how: str, mark: str) -> None:
    """Send the signal, and wait until all that have this mark are gone."""
    others = [other for other in living(mark) if other != process.pid]
    name, _, child = how.partition(" the ")
    aim = process.pid if not child or not others else min(others) if child.startswith("first") else max(others)
    os.kill(aim, getattr(signal, f"SIG{name}"))
    if child:  # one that is gone is told or made anew; then the command is stopped
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
    command.finish(process)
    until(lambda: not living(mark), lambda: f"they live on: {living(mark)}")


def found(folder: Path, name: str) -> list[Path]:
    """The files of this name, of which folders may go meanwhile."""
    return [Path(place, name) for place, _, names in os.walk(folder) if name in names]


def records(folder: Path) -> int:
    return sum(file.read_text().count("\n") for file in found(folder, "metrics.jsonl"))


@pytest.mark.slow
@pytest.mark.own_process  # whose environment /proc tells
@pytest.mark.parametrize("moment", ["evaluating", "saving"])
@pytest.mark.parametrize(
    ("verb", "words", "how"), AIMED, ids=lambda each: each if isinstance(each, str) else " ".join(each) or "-"
)
def test_what_is_stopped_while_it_evaluates_or_saves_goes_on(tmp_path, verb, words, how, moment):
    mark = uuid.uuid4().hex
    (tmp_path / "marked.py").write_text(LOSS)
    moments = tmp_path / "moments"
    moments.mkdir()
    env = {MARK: mark, "PYTHONPATH": str(tmp_path)}
    process = command.start(*verb, *RUN, *MARKED, *words, cwd=tmp_path, env=env)
    try:
        until(lambda: found(tmp_path, "manifest.json"))
        (moments / moment).unlink(missing_ok=True)
        until((moments / moment).exists, lambda: process.poll())
        stop(process, how, mark)
        before = records(tmp_path)
        (folder,) = tmp_path.glob("outputs/multirun/*/*" if verb is SWEEP else "outputs/*/*")
        again = command.start("train", *verb[1:2], f"resume={folder.relative_to(tmp_path)}", cwd=tmp_path, env=env)
        until(lambda: records(tmp_path) > before + 2 or again.poll() is not None)
        assert again.poll() is None, command.finish(again)
        stop(again, "TERM", mark)
    finally:
        for other in living(mark):
            os.kill(other, signal.SIGKILL)
