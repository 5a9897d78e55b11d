"""Heartbeats, the rendezvous, and the directory that all ranks write to."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import UserError
from drivetrain.core.world import World
from drivetrain.launch import addresses, elastic, heartbeat
from drivetrain.launch.elastic import ended_without_result, rank_folder
from drivetrain.launch.heartbeat import HeartbeatMonitor, start_heartbeat
from drivetrain.run import directory
from tests.support.put import put
from tests.support.waiting import LIMIT_S, until


class Looks:
    """The monitor's event that ends it, after so many looks."""

    def __init__(self, count: int) -> None:
        self.left = count

    def wait(self, _: float) -> bool:
        self.left -= 1
        return self.left < 0


def look(monitor: HeartbeatMonitor, count: int) -> None:
    """Have the monitor look so many times, INTERVAL_S apart by its own count."""
    monitor._stop = Looks(count)
    monitor._run()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.05)
    monkeypatch.setattr(heartbeat, "STACK_WAIT_S", 0.0)
    monkeypatch.setattr(heartbeat, "ABANDONED_AFTER_S", 0.0)


@pytest.fixture
def process():
    """One that gives no heartbeat, and ends when asked for its stack, as one would that has nothing to show."""
    begun = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield begun
    begun.send_signal(signal.SIGCONT)
    begun.kill()
    begun.wait()


def begin(folder: Path, rank: int, pid: int) -> None:
    (folder / f"{rank}.stack").touch()
    (folder / f"{rank}.heartbeat").write_text(str(pid))


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    until(lambda: heartbeat.process_state(process.pid) in heartbeat.STOPPED)


def test_a_stopped_rank_is_ended_and_named(quick, tmp_path, process):
    stop(process)
    begin(tmp_path, 3, process.pid)
    monitor = HeartbeatMonitor(tmp_path, heartbeat_timeout_s=0.2, stuck_s=60)
    look(monitor, 5)
    assert not monitor.ended
    look(monitor, 1)
    assert monitor.ended[3].startswith("rank 3 gave no heartbeat for")
    assert "stopped (SIGSTOP)" in monitor.ended[3]
    assert process.wait(LIMIT_S) != 0
    begin(tmp_path, 3, os.getppid())  # it has started again
    look(monitor, 1)
    assert 3 not in monitor.ended


def test_a_rank_that_is_only_busy_has_longer(quick, tmp_path, process):
    begin(tmp_path, 0, process.pid)
    monitor = HeartbeatMonitor(tmp_path, heartbeat_timeout_s=0.1, stuck_s=1.0)
    look(monitor, 12)
    assert not monitor.ended
    assert process.poll() is None
    look(monitor, 12)
    assert "stuck" in monitor.ended[0]


def test_nobody_else_is_ended(quick, tmp_path, process):
    """Neither a rank that has written its result, nor a process that is not one of ours."""
    begin(tmp_path, 0, process.pid)
    (tmp_path / "0.json").write_text(json.dumps({"code": 0}))
    begin(tmp_path, 1, os.getppid())
    monitor = HeartbeatMonitor(tmp_path, heartbeat_timeout_s=0.1, stuck_s=0.1)
    look(monitor, 12)
    assert not monitor.ended
    assert process.poll() is None


def test_signs_are_counted_and_not_timed(quick, tmp_path, process):
    """A machine that slept finds signs that are old by the clock, from ranks that slept with it."""
    begin(tmp_path, 0, process.pid)
    monitor = HeartbeatMonitor(tmp_path, heartbeat_timeout_s=2, stuck_s=2)
    for n in range(100):
        os.utime(tmp_path / "0.heartbeat", (1000 + n, 1000 + n))
        look(monitor, 1)
    assert not monitor.ended


@pytest.mark.parametrize(("codes", "called"), [((0, 0), False), ((0, 1), True), ((1, None), False)])
def test_only_those_that_failed_are_abandoned(quick, tmp_path, codes, called):
    """Ranks that are done may wait for a slower machine as long as it takes."""
    for rank, code in enumerate(codes):
        begin(tmp_path, rank, os.getppid())
        if code is not None:
            (tmp_path / f"{rank}.json").write_text(json.dumps({"code": code}))
    told = threading.Event()
    monitor = HeartbeatMonitor(tmp_path, heartbeat_timeout_s=60, stuck_s=60)
    monitor.abandoned = told.set
    look(monitor, 3)
    assert told.is_set() == called


# --- the rendezvous ---


def test_what_ranks_printed_is_one_file_for_each(tmp_path):
    from drivetrain.launch.elastic import _gather_output

    for attempt, rank, name, text in ((0, 1, "stdout", "before\n"), (0, 2, "stderr", ""), (1, 1, "stderr", "after\n")):
        place = tmp_path / f"drivetrain_x1/attempt_{attempt}/{rank}"
        put(place / f"{name}.log", text)
    _gather_output(tmp_path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"1.log": "before\nafter\n"}


@pytest.fixture
def listening():
    """A port of this machine on which something listens that is no launcher."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_that_is_taken(listening, monkeypatch, refused):
    monkeypatch.setattr("drivetrain.launch.elastic.ANSWER_S", 0.1)  # it never answers
    meet = ["parallel.nnodes=2", f"parallel.rendezvous=127.0.0.1:{listening}", "parallel.nproc=1"]
    said = refused("train", "-q", "data=digits", "parallel=ddp", *meet)
    assert f"port {listening} of this machine is in use by something else: set a free port" in said
    assert not set(addresses.INTERFACE_VARIABLES).intersection(os.environ), "this process is as it was"


def test_a_host_that_there_is_not(refused):
    meet = ["parallel.nnodes=2", "parallel.rendezvous=no-such-machine.invalid:29500", "parallel.nproc=1"]
    said = refused("train", "-q", "data=digits", "parallel=ddp", *meet)
    assert "there is no host of that name: give the name or address of one of the machines" in said


def test_ports(listening):
    assert not addresses.can_listen("127.0.0.1", listening)
    assert not addresses.is_torch_store("127.0.0.1", listening, 0.1)
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert addresses.is_torch_store("127.0.0.1", store.port, 5)
    assert addresses.can_listen("127.0.0.1", 0)


# --- one directory for all ranks ---


class ProcessGroupStrategy:
    """One rank as `directory.same_on_all_ranks` sees the others."""

    def __init__(self, rank: int, first: Path, sees: list[bool]) -> None:
        self.world, self._first, self._sees = World(rank, len(sees)), first, sees

    def broadcast_object(self, value: Any) -> Any:
        return (self._first, ".seen-1") if isinstance(value, tuple) else value

    def gather_object(self, value: bool) -> list[bool]:
        return [value, *self._sees[1:]]


def test_all_ranks_write_to_the_first_ones_directory(tmp_path):
    assert directory.same_on_all_ranks(tmp_path, ProcessGroupStrategy(0, tmp_path, [True, True])) == tmp_path
    assert not list(tmp_path.iterdir()), "no mark is left"
    (tmp_path / ".seen-1").touch()
    assert directory.same_on_all_ranks(Path(os.devnull), ProcessGroupStrategy(1, tmp_path, [True, True])) == tmp_path


def test_a_rank_that_cannot_see_it_is_named(tmp_path):
    with pytest.raises(UserError, match=r"ranks 1, 3 cannot see rank 0's .*: set output_dir to a disk that all machines share"):
        directory.same_on_all_ranks(tmp_path, ProcessGroupStrategy(0, tmp_path, [True, False, True, False]))


def test_how_a_rank_ended_is_said():
    assert ended_without_result({1: -9}) == "rank 1 ended without a result (killed, or out of memory)"
    assert (
        ended_without_result({0: -11, 1: -9})
        == "rank 0 and rank 1 ended without a result (by SIGSEGV and killed, or out of memory)"
    )
    assert ended_without_result({2: 7}) == "rank 2 ended without a result (exit code 7)"
    assert ended_without_result({}) == "a rank ended without a result (killed, or out of memory)"


# --- a run's folder `ranks` may have come from anybody: nothing is read or written through what stands in it ---


def test_what_stood_there_is_gone_but_for_what_ranks_printed(tmp_path: Path) -> None:
    secret = put(tmp_path / "secret", "kept")
    folder = tmp_path / "run" / "ranks"
    (folder / "drivetrain_x" / "attempt_0" / "1").mkdir(parents=True)
    (folder / "drivetrain_x" / "attempt_0" / "1" / "stdout.log").symlink_to(secret)
    (folder / "0.json").mkdir()
    (folder / "1.log").write_text("printed before\n")
    (folder / "2.log").symlink_to(secret)
    (folder / "3.heartbeat").symlink_to(secret)
    os.mkfifo(folder / "4.stack")
    with rank_folder(tmp_path / "run", several_machines=False) as found:
        assert found == folder
        assert [p.name for p in folder.iterdir()] == ["1.log"]
        printed = folder / "drivetrain_y" / "attempt_0" / "1"
        put(printed / "stdout.log", "and now\n")
    assert (folder / "1.log").read_text() == "printed before\nand now\n"
    assert secret.read_text() == "kept"


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ranks").symlink_to(tmp_path / "elsewhere")
    with rank_folder(tmp_path / "run", several_machines=False) as folder:
        assert folder.is_dir()
        assert not folder.is_symlink()
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_result_that_is_a_link_or_a_fifo_is_none(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text('{"code": 1}')
    (tmp_path / "1.json").symlink_to(tmp_path / "0.json")
    os.mkfifo(tmp_path / "2.json")
    assert heartbeat.read_results(tmp_path) == {0: {"code": 1}}


def test_a_heartbeat_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "7.heartbeat").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="it is a link"):
        start_heartbeat(tmp_path, 7)
    assert (tmp_path / "victim").read_text() == "kept"


# --- a signal to torch's launcher ---


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
