"""Short forms of bench.kills and bench.faults, and what they found."""

import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from bench import faults, harness, kills, syscalls

from drivetrain.core.machine import forking
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.tensors import Tensors
from drivetrain.engine.evaluator import Evaluator
from drivetrain.launch import elastic, heartbeat
from drivetrain.loader import Pipeline, workers
from drivetrain.loader.workers import Workers
from drivetrain.logger.files import Files
from drivetrain.saving import checkpoint_io
from tests.support import command, same_end, traced
from tests.support.waiting import LIMIT_S

NAMES = ("sync", "single", "fp32", "last")


class NoMore(Random):
    """Draws no further kill."""

    def random(self) -> float:
        return 0.9


@pytest.mark.skipif(not syscalls.SUPPORTED, reason="system calls are watched on Linux on x86-64 alone")
def test_a_run_that_is_killed_within_a_save_comes_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = kills.unbroken(NAMES, tmp_path)
    assert reference.calls > 50
    monkeypatch.setattr(kills.Kill, "drawn", lambda _: kills.Kill("call", 0.4, "SIGKILL", "all"))
    files_open = len(os.listdir("/proc/self/fd"))
    case = kills.judge(NAMES, reference, NoMore(), tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= files_open, "a campaign of a thousand runs has no more than a test of one"
    (kill,) = case.kills
    assert kill.startswith("SIGKILL to all before: ")
    assert case.outcome == kills.SAME, case
    file = reference.run_dir / "metrics.jsonl"
    file.write_text(file.read_text().replace('"update": 3,', '"update": 4,', 1))
    assert same_end.differences(reference.run_dir, reference.run_dir) == []
    copy = tmp_path / "copy"
    copy.symlink_to(reference.run_dir)
    monkeypatch.setattr(same_end, "losses", lambda run_dir: run_dir.name)
    assert same_end.differences(copy, reference.run_dir) == ["losses"]


@pytest.mark.slow
@pytest.mark.skipif(not syscalls.SUPPORTED, reason="system calls are watched on Linux on x86-64 alone")
def test_kills_of_many_combinations() -> None:
    cases = kills.campaign(24, 1, 2)
    assert [case for case in cases if case.outcome != kills.SAME] == []
    assert len(cases) == 24


def test_each_gradient_has_a_hash(tmp_path: Path) -> None:
    """So two runs that should be the same tell the update and the parameter at which they part."""
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.SGD(weights)
    for value in (1.0, 1.0, 1.0078125):  # a unit in the last place
        weights[0].grad, weights[1].grad = torch.full_like(weights[0], value), torch.ones(2, 2)
        traced.hash_gradients(optimizer)
    (file,) = tmp_path.glob("gradients-*.jsonl")
    first, same, other = map(json.loads, file.read_text().splitlines())
    assert first == same
    assert [a == b for a, b in zip(first["gradients"], other["gradients"], strict=True)] == [False, True]
    assert first["weights"] == other["weights"]


def test_hashes_are_written_in_a_run(tmp_path: Path) -> None:
    place = harness.place_in(tmp_path, "traced.py")
    names = ("sync", "single", traced.HASHED, "last")
    command.train(*kills.words_of(names), cwd=place, env={"HASHES": "1"}, code=0)
    (file,) = place.glob("gradients-*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 14
    assert len({row["weights"][0] for row in rows}) == 14, "each update changes them"
    assert all(len(row["gradients"]) == len(row["weights"]) == 8 for row in rows)


def test_what_ends_of_a_killed_run_are_faults() -> None:
    assert kills._wrong(kills.Ended(-9, "", "SIGKILL to all")) is None
    assert kills._wrong(kills.Ended(75, "error: stopped", "SIGTERM to all")) is None
    assert kills._wrong(kills.Ended(0, "", "")) is None
    for ended, outcome in (
        (kills.Ended(None, "", "SIGKILL to all"), kills.HANGS),
        (kills.Ended(1, "Traceback (most recent call last)", "SIGKILL to all"), kills.UNTYPED),
        (kills.Ended(1, "", "SIGKILL to all"), kills.UNTYPED),
        (kills.Ended(-11, "", "SIGKILL to all"), kills.UNTYPED),
        (kills.Ended(2, "error: in use", "SIGKILL to all"), kills.STUCK),
        (kills.Ended(1, "error: no", ""), kills.STUCK),
    ):
        found = kills._wrong(ended)
        assert found is not None
        assert found[0] == outcome


def test_a_fault_is_judged_by_what_is_stated(tmp_path: Path) -> None:
    """A run that is asked to end; the row says so, and another statement of it does not hold."""
    (fault,) = [fault for fault in faults.FAULTS if fault.strike == "told_to_end"]
    row = faults.plant(fault._replace(resumes=False), tmp_path, lambda _: tmp_path)
    assert (row.exit, row.result, row.checkpoints, row.wrong) == (75, "interrupted", ["8", "9"], [])
    (place,) = tmp_path.iterdir()
    done = faults.Done(1, "", "Traceback\nerror: one\nerror: two\n")
    wrong = faults._judged(fault._replace(resumes=False, says="three"), done, place, lambda _: tmp_path).wrong
    assert [w.split(":")[0] for w in wrong] == [
        "exit code 1 instead of 75",
        "a traceback",
        "2 errors",
        "the message is not 'three'",
    ]


@pytest.mark.slow
def test_every_fault_ends_as_stated() -> None:
    rows, _ = faults.campaign(faults.FAULTS)
    assert [row for row in rows if row.wrong] == []


def test_the_docs_have_the_table_of_faults() -> None:
    page = (Path(faults.__file__).parents[1] / faults.TABLE).read_text()
    assert faults.markdown(faults.FAULTS) in page


# --- what was found ---


def test_evaluations_that_come_again_are_there_once(tmp_path: Path) -> None:
    """A kill after the last evaluation: the resumed run makes it again, as it makes those of the run's end."""
    log = Files()

    def record(event: str, update: int, **more: str) -> None:
        log.log({"event": event, "update": update, **more})

    log.start(tmp_path, 0)
    for update in (1, 2, 3):
        record("train", update)
    record("evaluate", 2, set="validation")
    record("evaluate", 3, set="validation")
    record("evaluate", 3, set="test", weights="final")
    log.close()

    def kept(evaluated: int) -> list[tuple[str, int, str]]:
        log = Files()
        log.start(tmp_path, 3, evaluated)
        log.close()
        lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        return [(r["event"], r["update"], r.get("set", "")) for r in lines]

    trained = [("train", 1, ""), ("train", 2, ""), ("train", 3, ""), ("evaluate", 2, "validation")]
    assert kept(3) == [*trained, ("evaluate", 3, "validation")]
    assert kept(2) == trained, "the checkpoint was saved before the evaluation"


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for folder in (root / "2", root / ".writing-4", root / ".replaced-2", root / ".replaced-3", elsewhere):
        folder.mkdir(parents=True)
        (folder / "state.pt").touch()
    (root / ".writing-6").symlink_to(elsewhere)
    checkpoint_io.remove_unfinished(tmp_path)
    assert {p.name for p in root.iterdir()} - {".writing-6"} == {"2", "3"}, "3 was to be replaced, and was not"
    assert (elsewhere / "state.pt").exists()


@pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="there is no telling who sent a signal")
def test_a_worker_ends_with_the_run_and_not_before() -> None:
    """SIGTERM to all processes, as Slurm and systemd send it: the run needs its next batch to finish its update."""
    source = Tensors(torch.arange(12.0).reshape(12, 1, 1, 1), torch.zeros(12, dtype=torch.int64))
    requests = [Request(0, torch.tensor([number]), 1.0) for number in range(12)]
    before = set(multiprocessing.active_children())
    stream = Workers(num_workers=1, prefetch_factor=1).stream(
        Pipeline(source, (), None, 0), requests, torch.device("cpu"), torch.contiguous_format
    )
    next(stream)
    (worker,) = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    assert sum(1 for _ in stream) == 11
    worker.join(LIMIT_S)
    assert worker.exitcode == 0

    with workers._sigterm_blocked():
        child = multiprocessing.get_context("fork").Process(
            target=lambda: (workers._begin_worker(sys.__stderr__, 0), time.sleep(LIMIT_S))
        )
        child.start()
    subprocess.run(["kill", "-TERM", str(child.pid)], check=True)
    child.join(0.3)
    assert child.is_alive()
    child.terminate()
    child.join(LIMIT_S)
    assert child.exitcode == 0


BEGINNINGS = {
    "a loader's worker": lambda _: workers._begin_worker(sys.__stderr__, 0),
    "a rank": lambda folder: heartbeat.start_heartbeat(folder, 0),
    "a trial of batch=auto": lambda _: forking.end_with_parent(),
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_process_ends_though_its_parent_was_killed_before_it_began(
    begin: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank would wait for the launcher's store, a worker for a request. A parent killed while it forks is not there later."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(forking, "LOOK_S", 0.05)
    reads, writes = fork.Pipe(duplex=False)

    def child() -> None:
        parent = forking.parent_pid()
        while os.getppid() == parent:
            time.sleep(0.01)
        begin(tmp_path)
        time.sleep(2 * LIMIT_S)

    def parent() -> None:
        fork.Process(target=child).start()
        os._exit(0)

    process = fork.Process(target=parent)
    process.start()
    process.join(LIMIT_S)
    writes.close()
    assert reads.poll(LIMIT_S)
    with pytest.raises(EOFError):  # all that had the other end have ended
        reads.recv()


def test_a_worker_of_a_killed_run_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(workers, "end_with_run", lambda run: None)
    threads = torch.get_num_threads()
    with tempfile.TemporaryFile() as stacks:
        workers._begin_worker(stacks, 0)
        faulthandler.unregister(workers.STACK_SIGNAL)
    torch.set_num_threads(threads)
    sys.excepthook(EOFError, EOFError(), None)
    sys.excepthook(ConnectionResetError, ConnectionResetError(), None)
    assert capsys.readouterr().err == ""
    sys.excepthook(ValueError, ValueError("an error of the reader's own"), None)
    assert "an error of the reader's own" in capsys.readouterr().err


def test_a_workers_death_is_known_wherever_it_is_raised(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's signal handler raises it in the main thread, whatever that does: here in an evaluation."""

    def dies(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(Evaluator, "evaluate", dies)
    loading = ("loader=workers", "loader.num_workers=1")
    ended = train("data=digits", *loading, "updates=2", "epochs=2", "saving.every_updates=1", ends="interrupted")
    assert "a loader's worker was killed" in ended.error
    assert f"resume={ended.run_dir}" in ended.error


def test_a_signal_at_a_bad_moment_is_raised_later(capsys: pytest.CaptureFixture[str]) -> None:
    """Python drops what a handler raises in a fork hook or a destructor, and logging what is raised while it writes a line."""
    from torch.distributed.elastic.multiprocessing import SignalException

    class Stops(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                signal.raise_signal(signal.SIGTERM)
            except Exception:
                self.handleError(record)

    class StopsAtItsEnd:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    log = logging.Logger("stops")
    log.addHandler(Stops())
    for bad_moment in (lambda: log.error("a line"), StopsAtItsEnd):
        with elastic.raised_as_torch_does():
            bad_moment()
            with pytest.raises(SignalException):
                time.sleep(LIMIT_S)
        assert capsys.readouterr().err == ""


def test_torchs_launcher_prints_no_traceback_of_a_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch.distributed.launcher.api  # noqa: F401 - makes the logger

    monitor = heartbeat.HeartbeatMonitor(tmp_path, 30, 600)
    with elastic.FailureRecorder(tmp_path, monitor):
        logging.getLogger("torch.distributed.launcher.api").error("Error shutting down rendezvous handler")
    assert capsys.readouterr().err == ""
