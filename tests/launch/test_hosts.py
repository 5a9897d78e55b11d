"""Several machines: network namespaces joined by a cable, the same command in each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.support import command
from tests.support.command import Done, only_run, result, train
from tests.support.waiting import until

WORDS = ("data=digits", "model=mlp", "model.hidden=[16]", "log_every=1", "epochs=2", "runtime.device=cpu", "runtime.threads=1")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def why_not() -> str | None:
    """The reason why namespaces cannot be made here, if there is one."""
    if shutil.which("ip") is None:
        return "no `ip` here"
    name = f"dt-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    ip("netns", "del", name)
    return None


class Hosts:
    """Two machines, as far as the network is concerned."""

    def __init__(self, names: list[str], addresses: list[str]) -> None:
        self.names, self.addresses = names, addresses

    def start(self, host: int, place: Path, *words: str) -> subprocess.Popen[str]:
        """`drivetrain train` on one of them."""
        return self.python(host, place, *command.DRIVETRAIN, "train", "-q", *words)

    def python(self, host: int, place: Path, *words: str) -> subprocess.Popen[str]:
        """Python on one of them."""
        inside = ["ip", "netns", "exec", self.names[host], sys.executable, *words]
        return subprocess.Popen(
            inside, cwd=place, env=command.environment(), text=True, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def cut(self) -> None:
        """Take the cable out."""
        ip("-n", self.names[1], "link", "set", "cable", "down")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    names = [f"dt{os.getpid()}{side}" for side in "ab"]
    third = os.getpid() % 250
    addresses = [f"10.213.{third}.{n}" for n in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield Hosts(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """A disk for each machine: they share none."""
    return [command.empty(tmp_path / name) for name in ("a", "b")]


Together = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def together(hosts: Hosts, places: list[Path]) -> Together:
    """`together(words)`: the same command begun on both."""

    def begin(*words: str, of_b: tuple[str, ...] = ()) -> list[subprocess.Popen[str]]:
        meet = ("parallel.nnodes=2", f"parallel.rendezvous={hosts.addresses[0]}:29500", "parallel.nproc=1")
        return [hosts.start(n, places[n], *WORDS, *meet, *words, *(of_b if n else ())) for n in (0, 1)]

    return begin


def runs(places: list[Path]) -> list[Path]:
    return [run for place in places for run in command.runs(place / "outputs")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_machines_train_as_one(together: Together, places: list[Path], tmp_path: Path, strategy: str) -> None:
    ended = [command.finish(p) for p in together(f"parallel={strategy}")]
    assert [done.code for done in ended] == [0, 0], ended
    (run_dir,) = runs(places)  # one of them has it
    assert result(run_dir)["world_size"] == 2
    alone = train(*WORDS, cwd=command.empty(tmp_path / "alone"))
    assert alone.code == 0, alone
    expected = only_run(tmp_path / "alone" / "outputs")
    saved = (command.checkpoints(run)[-1] / "model.safetensors" for run in (run_dir, expected))
    ours, theirs = map(safetensors.torch.load_file, saved)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert sum("test accuracy" in done.out for done in ended) == 1, "one machine reports"
    assert sum("the run's directory is where rank 0 is" in done.err for done in ended) == 1


@pytest.mark.slow
def test_a_machine_that_is_cut_off(hosts: Hosts, together: Together, places: list[Path]) -> None:
    """Both end by themselves within the timeout; the one with the run says how to go on, and it does."""
    begun = together("parallel=ddp", "parallel.timeout_s=6", "epochs=2000", "saving.every_updates=10")
    until(lambda: [c for run in runs(places) for c in command.checkpoints(run)], lambda: [p.poll() for p in begun])
    hosts.cut()
    ended = [command.finish(p) for p in begun]
    (run_dir,) = runs(places)
    first = next(n for n, place in enumerate(places) if run_dir.is_relative_to(place))
    assert ended[first].code == 75, ended
    assert any("the ranks of another machine are gone" in e and "go on with resume=" in e for e in ended[first].errors)
    assert ended[1 - first].code != 0
    assert result(run_dir)["status"] == "interrupted"
    updates = int(command.checkpoints(run_dir)[-1].name)
    words = ("parallel=single", "resume_changed=true", f"updates={updates + 3}")
    again = train(f"resume={run_dir}", *words, cwd=places[first])
    assert again.code == 0, again
    assert result(run_dir)["updates"] == updates + 3


@pytest.mark.slow
def test_a_rank_of_one_machine_dies_and_both_start_again(
    together: Together, places: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share no disk: rank 0 sends the others the state that it has saved."""
    faulty = ("model=own", "model.target=faulty_nets.Faulty", "trust=[faulty_nets]", "saving.every_updates=3", "parallel=ddp")
    alone = command.empty(tmp_path / "alone")
    for place in (*places, alone):
        shutil.copy(command.HERE / "faulty_nets.py", place)
    words = [w for w in WORDS if not w.startswith("model")]
    whole = train(*words, *faulty, cwd=alone)
    assert whole.code == 0, whole
    once = command.empty(tmp_path / "struck") / "once"
    for name, value in (("FAULT", "killed"), ("FAULT_AT", "9"), ("FAULT_RANK", "1"), ("FAULT_ONCE", str(once))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.modules[__name__], "WORDS", tuple(words))
    ended = [command.finish(p) for p in together(*faulty, "parallel.max_restarts=1")]
    assert [done.code for done in ended] == [0, 0], ended
    assert once.exists()
    assert sum("all start again from" in done.err for done in ended) == 1
    (run_dir,) = runs(places)
    assert command.losses(run_dir) == command.losses(only_run(alone / "outputs"))
    assert command.weights(run_dir) == command.weights(only_run(alone / "outputs"))


@pytest.mark.slow
def test_machines_that_were_told_different_things(together: Together, places: list[Path]) -> None:
    ended: list[Done] = [command.finish(p) for p in together("parallel=ddp", of_b=("optimizer.lr=0.5",))]
    assert [done.code for done in ended] == [2, 2], ended
    for done in ended:
        assert "the ranks were not started alike" in done.err
        assert "optimizer.lr is 0.5 and " in done.err or " and 0.5" in done.err
        assert "give the same command everywhere" in done.err
    assert not runs(places)
    assert not [p for place in places for p in place.iterdir()], "nothing written"


@pytest.mark.slow
def test_another_program_where_machines_meet(hosts: Hosts, places: list[Path]) -> None:
    """It takes the connection and answers nothing: neither machine waits for it longer than it says."""
    code = "import socket, time; s = socket.create_server(('', 29500)); print(flush=True); time.sleep(600)"
    other = hosts.python(0, places[0], "-c", code)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        meet = ("parallel.nnodes=2", f"parallel.rendezvous={hosts.addresses[0]}:29500", "parallel.rendezvous_s=5")
        ended = [command.finish(hosts.start(n, places[n], *WORDS, "parallel=ddp", *meet)) for n in (0, 1)]
    finally:
        command.kill_all(other)
        other.communicate()
    assert [done.code for done in ended] == [2, 2], ended
    assert "port 29500 of this machine is in use by something else" in ended[0].err
    assert "what answers there is none of this run's machines" in ended[1].err
    assert all(len(done.err.splitlines()) == 1 for done in ended), ended
