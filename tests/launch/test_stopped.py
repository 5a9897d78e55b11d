"""A command that is stopped or killed, whenever that is and whatever it has started: it says so, and leaves nobody behind."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.core.errors import INTERRUPTED
from drivetrain.launch import launcher
from tests.support import command
from tests.support.waiting import LIMIT_S, until

LOOK = ("batch=critical", "batch.look_updates=100000", "epochs=20000", "updates=null")


def gone(process: int) -> bool:
    """Wait for the end of a process."""
    return until(lambda: not Path(f"/proc/{process}").exists())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_a_run_is_answered_in_words(tiny, monkeypatch, capsys, number):
    monkeypatch.setattr(launcher, "_announce", lambda *_: signal.raise_signal(number))
    assert main.main(["train", *tiny()]) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    assert not Path("outputs").exists()


def test_a_signal_in_the_look_of_batch_critical_ends_its_process(tiny, tmp_path, monkeypatch, capsys):
    gate = command.empty(tmp_path / "gate")
    command.with_own_nets(tmp_path / "nets")
    monkeypatch.chdir(tmp_path / "nets")
    monkeypatch.setenv("GATE", str(gate))
    monkeypatch.setenv("GATE_AT", "1")
    looking: list[int] = []

    def tell() -> None:
        looking.append(int(until(lambda: list(gate.iterdir()))[0].name.rpartition("-")[2]))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    own = ("model=own", "model.target=my_nets.Gated", "trust=[my_nets]", "runtime.device=cpu")
    assert main.main(["train", *tiny(*LOOK, *own)]) == INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    assert looking
    assert gone(looking[0])
    assert not Path("outputs").exists()


@pytest.mark.slow
def test_a_run_of_recipe_verify_ends_with_its_starter(tiny, tmp_path, monkeypatch):
    """Its other runs are forked, and end as ranks do."""
    monkeypatch.chdir(command.with_own_nets(tmp_path / "nets"))
    gate = command.empty(tmp_path / "gate")
    own = ("model=own", "model.target=my_nets.Gated", "trust=[my_nets]", "runtime.device=cpu")
    words = tiny(*own, "epochs=20000", "updates=null")
    env = {**command.environment(), "GATE": str(gate), "GATE_AT": "1"}
    run = subprocess.Popen(
        [sys.executable, "-m", "drivetrain.cli.child", "train", "--quiet", *words], stdin=subprocess.PIPE, env=env
    )
    try:
        command.arrivals(gate, 1, run)
        assert run.stdin is not None
        run.stdin.close()
        assert run.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        run.kill()


PROGRAM = """
import signal, sys
import drivetrain

def note(number, frame):
    print("handler", flush=True)

if __name__ == "__main__":
    handler, words = sys.argv[1], sys.argv[2:]
    if handler == "own":
        signal.signal(signal.SIGTERM, note)
    for number in (1, 2):
        print("ended", drivetrain.train([*words, f"runtime.seed={number}"]).status, flush=True)
        words = [word for word in words if not word.startswith(("model", "parallel"))] + ["model=mlp", "updates=1"]
"""


def a_program_at_the_gate(tmp_path, handler, *words):
    """A program that trains twice, its first run at the gate; (process, the processes at the gate, the file that lets go)."""
    place = command.with_own_nets(tmp_path / "place")
    (place / "program.py").write_text(PROGRAM)
    gate = command.empty(tmp_path / "gate")
    own = ("model=own", "model.target=my_nets.Gated", "trust=[my_nets]", "runtime.device=cpu", "epochs=20000", "updates=null")
    process = command.start(handler, *words, *own, cwd=place, how=["program.py"], env={"GATE": str(gate), "GATE_AT": "2"})
    ranks = 2 if "parallel=ddp" in words else 1
    arrived = command.arrivals(gate, ranks, process)
    return process, [int(file.name.rpartition("-")[2]) for file in arrived], gate / "go"


DDP = ("parallel=ddp", "parallel.nproc=2")


@pytest.mark.parametrize(("handler", "strategy"), [("own", ()), ("none", DDP)], ids=["in this process", "in others"])
def test_a_signal_in_a_users_program_does_what_it_would_have_done_after_the_run(tiny, tmp_path, strategy, handler):
    process, ranks, go = a_program_at_the_gate(tmp_path, handler, *tiny(*strategy))
    process.send_signal(signal.SIGTERM)
    go.touch()
    done = command.finish(process)
    ends = sorted(command.result(run)["status"] for run in command.runs(tmp_path / "place"))
    assert ends == (["interrupted"] if handler == "none" else ["completed", "interrupted"]), done
    said = [line for line in done.out.splitlines() if line.startswith(("handler", "ended"))]
    if handler == "none":
        assert (done.code, said) == (-signal.SIGTERM, []), done
    else:
        assert (done.code, said) == (0, ["handler", "ended interrupted", "ended completed"]), done
    assert all(gone(rank) for rank in ranks)


def test_nothing_outlives_a_users_program_that_is_killed(tiny, tmp_path):
    process, ranks, go = a_program_at_the_gate(tmp_path, "none", *tiny(*DDP))
    process.kill()
    go.touch()
    process.communicate()
    assert all(gone(rank) for rank in ranks)


AT_A_MOMENT = """
import atexit, os, signal, sys
from pkgutil import resolve_name
from drivetrain.cli import main

def tell():
    os.kill(os.getpid(), signal.SIGTERM)

moment, *words = sys.argv[1:]
when, place = moment.split()
if when == "atexit":
    atexit.register(tell)
elif when != "exit":
    owner, _, name = place.rpartition(".")
    owner = resolve_name(owner)
    real = getattr(owner, name)
    def told(*given, **named):
        if when == "before":
            tell()
        try:  # as an import of an optional library does
            if when in ("dropped", "turned"):
                tell()
        except BaseException:
            if when == "turned":
                raise ImportError("half of it")
        found = real(*given, **named)
        if when == "after":
            tell()
        return found
    setattr(owner, name, told)
code = main.main(["train", *words], program=True)
if when == "exit":
    tell()
sys.exit(code)
"""
WINDING_UP = [
    "after drivetrain.launch.launcher.run_rank", "after drivetrain.run.result:Result.write",
    "before drivetrain.ui.pages.runs.write", "before drivetrain.ui.terminal.show_result",
    "after drivetrain.measure.report.report.add_samples", "atexit main", "exit main",
]  # fmt: skip
BEGINNING = ["before drivetrain.cli.main._prepared", "before drivetrain.launch.launcher._announce"]
BEGINNING += [f"{when} drivetrain.config.validate.validate" for when in ("dropped", "turned")]


def told_at(moment, tmp_path, *words):
    """A command that is told to stop at a moment; (its end, the statuses of its runs)."""
    place = command.empty(tmp_path / "place")
    (place / "program.py").write_text(AT_A_MOMENT)
    done = command.finish(command.start(moment, *words, cwd=place, how=["program.py"]))
    return done, [command.result(run)["status"] for run in command.runs(place)]


@pytest.mark.parametrize("moment", WINDING_UP)
def test_a_signal_after_the_result_leaves_the_exit_code(tiny, tmp_path, moment):
    done, runs = told_at(moment, tmp_path, *tiny("updates=1"))
    assert (done.code, runs) == (0, ["completed"]), done


@pytest.mark.parametrize("moment", BEGINNING)
def test_a_signal_at_the_beginning_is_a_stop(tiny, tmp_path, moment):
    """What an import makes of the exception is none of its own errors."""
    done, runs = told_at(moment, tmp_path, *tiny("updates=1"))
    assert (done.code, done.err, runs) == (INTERRUPTED, "interrupted\n", []), done


RANKS = [
    ("before drivetrain.launch.elastic.rank_folder", INTERRUPTED, []),
    ("after drivetrain.launch.elastic._launch_ranks", 0, ["completed"]),
]


@pytest.mark.parametrize(("moment", "code", "statuses"), RANKS)
def test_a_launcher_of_ranks_is_told_before_and_after_them(tiny, tmp_path, moment, code, statuses):
    done, runs = told_at(moment, tmp_path, *tiny("updates=1", *DDP))
    assert (done.code, runs) == (code, statuses), done


SWEEP = ("optimizer=sgd,adamw", *DDP)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_sweep_whose_jobs_have_ranks(tiny, tmp_path, number):
    """A job of a sweep is forked, and starts its ranks itself."""
    place = command.with_own_nets(tmp_path / "place")
    own = ("model=own", "model.target=my_nets.Gated", "trust=[my_nets]", "runtime.device=cpu", "epochs=20000", "updates=null")
    words = [word for word in tiny(*own) if not word.startswith("optimizer=")]
    with command.at_the_gate(place, "2", "-m", *words, *SWEEP, ranks=2) as (sweep, go):
        arrived = [*go.parent.iterdir()]
        sweep.send_signal(number)
        go.touch()
        command.finish(sweep)
        assert all(gone(int(file.name.rpartition("-")[2])) for file in arrived)
    assert command.result(command.runs(place)[0])["status"] == "interrupted"


# --- whatever starts runs, and however it is stopped or killed: nobody of it lives on, and what had saved goes on ---


MARK = "DRIVETRAIN_TEST_MARK"  # in the environment of all that a command starts
ENDLESS = (
    "data=digits", "model=mlp", "runtime.device=cpu", "batch.global_batch=64", "log_every=1", "saving.every_updates=2",
    "epochs=100000",
)  # fmt: skip
TWO_RANKS, FSDP = (("parallel=" + name, "parallel.nproc=2") for name in ("ddp", "fsdp"))
WORKERS, THREADS = (("loader=" + name,) for name in ("workers", "threads"))
IN_A_FORK = """
import multiprocessing, sys
import drivetrain
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=drivetrain.train, args=(sys.argv[1:],), daemon=True)
    process.start()
    process.join()
"""
TRAIN, OF_TWO = ("train",), ("train", "-m", "optimizer=sgd,adamw")
COMPARE, ABLATE = ("compare", "optimizer=sgd,adamw"), ("ablate", "recipe=digits_fast", "baseline=naive", "rounds=9")
TUNE, DOCTOR, FORK = ("tune", "what=lr"), ("doctor",), ("fork",)
WAYS = ((), TWO_RANKS, FSDP, WORKERS, THREADS)
HOWS = (
    "INT",
    "TERM",
    "KILL",
    *(f"{name} the {which} child" for name in ("KILL", "TERM") for which in ("first", "last")),
)  # a launcher; a rank, or a loader's worker
CASES = [
    *itertools.product((TRAIN, OF_TWO, FORK), WAYS, HOWS),
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
AIMED = [*itertools.product((TRAIN, OF_TWO), WAYS, HOWS)]


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
    given = [*(verb if verb is not FORK else ()), *(word for word in ENDLESS if not word.startswith(of_its_own)), *words]
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
    process = command.start(*verb, *ENDLESS, *MARKED, *words, cwd=tmp_path, env=env)
    try:
        until(lambda: found(tmp_path, "manifest.json"))
        (moments / moment).unlink(missing_ok=True)
        until((moments / moment).exists, lambda: process.poll())
        stop(process, how, mark)
        before = records(tmp_path)
        (folder,) = tmp_path.glob("outputs/multirun/*/*" if verb is OF_TWO else "outputs/*/*")
        again = command.start("train", *verb[1:2], f"resume={folder.relative_to(tmp_path)}", cwd=tmp_path, env=env)
        until(lambda: records(tmp_path) > before + 2 or again.poll() is not None)
        assert again.poll() is None, command.finish(again)
        stop(again, "TERM", mark)
    finally:
        for other in living(mark):
            os.kill(other, signal.SIGKILL)


# --- A process that forks ranks, jobs, variants or probes: what is forked can use the devices, and is not left behind ---


def take(tmp_path, *ways: str) -> dict[str, dict]:
    """Take these ways of forking, on a machine that seems to have two CUDA devices (support/forks.py)."""
    path = f"{command.PACKAGE}{os.pathsep}{command.ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.forks", *ways],
        cwd=tmp_path, env=command.environment() | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_safe(found: dict[str, dict], ways: dict[str, int]) -> None:
    assert found.keys() == ways.keys()
    for name, forks in ways.items():
        assert found[name]["started"] == [], name
        assert not found[name]["initialized"], name
        assert len(found[name]["forks"]) >= forks, (name, found[name])
        assert set(found[name]["forks"]) == {"usable"}, name


def test_ranks_jobs_variants_and_probes_can_use_the_devices(tmp_path):
    ways = {
        "train": 2,
        "sweep": 2,
        "compare": 1,
        "doctor": 1,
        "certify": 1,
        "bisect": 1,
    }  # a first variant that ends ends the others
    assert_safe(take(tmp_path, *ways), ways)


@pytest.mark.slow
def test_so_can_the_variants_of_a_search_and_of_an_ablation(tmp_path):
    ways = {"tune": 1, "ablate": 1}
    assert_safe(take(tmp_path, *ways), ways)


def assert_nothing_is_left(found: dict[str, dict]) -> None:
    for name, left in found.items():
        assert {**left, "ended": ""} == {"ended": "", "processes": [], "files": []}, name
        may = {"sweep": ["returned"], "train": ["returned", "interrupted"]}  # a result, once a rank has begun
        assert left["ended"] in may.get(name.removesuffix("_at_start"), ["interrupted"]), name


def test_a_signal_leaves_no_forked_process_and_no_folder(tmp_path):
    assert_nothing_is_left(take(tmp_path, "stop", "train", "train_at_start", "sweep", "compare", "doctor", "certify"))


@pytest.mark.slow
def test_so_it_is_on_the_longer_ways(tmp_path):
    assert_nothing_is_left(take(tmp_path, "stop", "ablate", "tune", "bisect"))
