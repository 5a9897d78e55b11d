"""Ranks by any launcher and on several machines: one run, one result, and its end when something happens to one of them."""

import multiprocessing
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from drivetrain.launch.elastic import Gate
from tests.support import command
from tests.support.command import (
    OWN,
    TINY,
    TORCHRUN,
    Done,
    checkpoints,
    empty,
    losses,
    only_run,
    records,
    result,
    run,
    runs,
    train,
    weights,
)
from tests.support.waiting import until

WORDS = (
    "data=digits", "model=own", "model.target=faulty_nets.Faulty", "trust=[faulty_nets]", "optimizer=adamw", "log_every=1",
    "epochs=2", "parallel=ddp", "runtime.device=cpu", "saving.every_updates=3",
)  # fmt: skip
UPDATES = 16


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run to which nothing happens."""
    return only_run(faulted(tmp_path_factory.mktemp("whole"), "", 0)[0])


def faulted(
    place: Path, fault: str, rank: int, *words: str, at: int = 9, how: Sequence[str] = command.DRIVETRAIN, code: int | None = None
) -> tuple[Path, Done]:
    """The outputs of a run in which a fault strikes, and what the command said.

    A run that waited for a timeout of its own is killed long before as one that hangs: it is an hour.
    """
    shutil.copy(command.HERE / "faulty_nets.py", place)
    (place / "struck").mkdir(exist_ok=True)
    about = {
        "FAULT": fault,
        "FAULT_AT": str(at if fault else 0),
        "FAULT_RANK": str(rank),
        "FAULT_ONCE": str(place / "struck/once"),
    }
    return place / "outputs", train(*WORDS, "parallel.timeout_s=3600", *words, cwd=place, env=about, how=how, code=code)


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("ddp", 1), *(pytest.param(*both, marks=pytest.mark.slow) for both in (("ddp", 0), ("fsdp", 0), ("fsdp", 1)))],
)
def test_a_killed_rank_and_all_start_again(whole: Path, tmp_path: Path, rank: int, strategy: str) -> None:
    """From the newest checkpoint, and to the end bit for bit as if nothing had been."""
    outputs, done = faulted(tmp_path, "killed", rank, f"parallel={strategy}", "parallel.max_restarts=1", code=0)
    assert f"rank {rank} ended without a result (killed, or out of memory): all start again from" in done.err
    assert "(restart 1)" in done.err
    run_dir = only_run(outputs)
    assert result(run_dir)["updates"] == UPDATES
    assert [update for update, *_ in losses(run_dir)] == list(range(1, UPDATES + 1)), "none lost, none twice"
    if strategy == "ddp":
        assert losses(run_dir) == losses(whole)
        assert weights(run_dir) == weights(whole)


def test_a_stopped_rank_is_found_named_and_shown(tmp_path: Path) -> None:
    outputs, done = faulted(tmp_path, "stopped", 1, "parallel.heartbeat_timeout_s=0.5", code=1)
    run_dir = only_run(outputs)
    (line,) = {e for e in done.errors if "rank 1" in e}
    assert "rank 1 gave no heartbeat for" in line
    assert "stopped (SIGSTOP)" in line
    assert f"go on with resume={run_dir}" in line or f"resume={run_dir.relative_to(tmp_path)}" in line
    stack = (run_dir / "ranks" / "1.stack").read_text()
    assert "faulty_nets.py" in stack
    assert "in stopped" in stack


@pytest.mark.slow
def test_a_stopped_rank_and_all_start_again(whole: Path, tmp_path: Path) -> None:
    outputs, done = faulted(tmp_path, "stopped", 0, "parallel.heartbeat_timeout_s=0.5", "parallel.max_restarts=1", code=0)
    run_dir = only_run(outputs)
    assert weights(run_dir) == weights(whole)
    assert "rank 0 gave no heartbeat for" in done.err
    assert "all start again from" in done.err
    assert "in stopped" in (run_dir / "ranks" / "0.stack").read_text(), "it stays"


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_one_ranks_nan_is_all_ranks(tmp_path: Path, strategy: str) -> None:
    outputs, done = faulted(tmp_path, "not_a_number", 1, f"parallel={strategy}", "parallel.max_restarts=2", code=3)
    found = result(only_run(outputs))
    assert found["status"] == "diverged"
    assert found["error"].startswith("the loss is nan")
    assert "start again" not in done.err, "it would diverge again"


@pytest.mark.slow
def test_another_number_of_ranks_between_runs_keeps_the_order_of_the_data(
    tmp_path: Path, losses_close: Callable[[Path, Path], None]
) -> None:
    """2 ranks, 1, 2 again: the updates are those of one run, none lost, none repeated."""
    words = ("data=digits", "model=mlp", "model.hidden=[16]", "scheduler=constant", "log_every=1", "epochs=2", "parallel=ddp")
    train(*words, "output_dir=one", cwd=tmp_path, code=0)
    train(*words, "updates=5", "output_dir=many", cwd=tmp_path, code=0)
    run_dir = only_run(tmp_path / "many")
    for updates, ranks in ((14, 1), (UPDATES, 2)):
        train(f"resume={run_dir}", "resume_changed=true", f"parallel.nproc={ranks}", f"updates={updates}", cwd=tmp_path, code=0)
    losses_close(only_run(tmp_path / "one"), run_dir)


@pytest.fixture
def losses_close() -> Callable[[Path, Path], None]:
    """Two runs' losses, update by update, but for the order of sums."""

    def compare(one: Path, other: Path) -> None:
        assert [(u, samples) for u, _, _, _, samples, _ in losses(other)] == [(u, s) for u, _, _, _, s, _ in losses(one)]
        assert [loss for _, _, loss, *_ in losses(other)] == pytest.approx([loss for _, _, loss, *_ in losses(one)], rel=1e-4)

    return compare


def test_a_rendezvous_that_is_never_complete(tmp_path: Path) -> None:
    """One machine of two: an error after the stated time, nothing written."""
    meet = ("parallel.nnodes=2", "parallel.rendezvous=127.0.0.1:29871", "parallel.rendezvous_s=1", "parallel.nproc=1")
    _, done = faulted(tmp_path, "", 0, *meet, code=2)
    assert "parallel.rendezvous=127.0.0.1:29871: 2 machines did not meet within 1 s" in done.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_one_machine_plays_two(tmp_path: Path) -> None:
    """Begun at the same moment: one of them opens the place to meet, the other comes to it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [command.empty(tmp_path / name) for name in ("a", "b")]
    meet = ("parallel=ddp", "parallel.nproc=1", "parallel.nnodes=2", f"parallel.rendezvous=127.0.0.1:{port}", "updates=3")
    words = ("train", "-q", "data=digits", "model=mlp", "model.hidden=[16]", "runtime.device=cpu", *meet)
    ended = [command.finish(p) for p in [command.start(*words, cwd=place) for place in places]]
    assert [done.code for done in ended] == [0, 0], ended
    (run_dir,) = command.runs(tmp_path)
    assert result(run_dir)["world_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_torchruns_that_stops(tmp_path: Path, rank: int) -> None:
    """Its launcher sees nothing: the others end after timeout_s, and say how to go on."""
    outputs, done = faulted(tmp_path, "stopped", rank, "parallel.timeout_s=4", how=TORCHRUN)
    assert done.code != 0
    if rank == 0:
        assert "rank 1: another rank is gone, or cannot be reached" in done.err
        return
    run_dir = only_run(outputs)
    assert any(e.startswith("error: another rank is gone, or cannot be reached: go on with resume=") for e in done.errors), done
    assert result(run_dir)["status"] == "interrupted"


@pytest.mark.slow
def test_what_another_launcher_does_is_not_ours(tmp_path: Path) -> None:
    refused = train("data=digits", "parallel=ddp", "parallel.max_restarts=1", cwd=tmp_path, how=TORCHRUN)
    assert any("parallel.max_restarts=1, but a launcher started the ranks" in e for e in refused.errors)
    assert not list(tmp_path.iterdir()), "nothing written"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.nnodes=2"], "need an address to connect to: set parallel.rendezvous=host:port"),
        (["parallel.nnodes=2", "parallel.rendezvous=node1"], "parallel.rendezvous=node1 is no host:port"),
        (["parallel.nnodes=2", "parallel.rendezvous=node1:65536"], "parallel.rendezvous=node1:65536 is no host:port"),
        (["parallel.rendezvous=node1:29500"], "has no effect on one machine: set parallel.nnodes"),
        (["parallel.max_restarts=3", "saving=none"], "parallel.max_restarts=3 has no checkpoint to restart from"),
        (["parallel=fsdp", "parallel.replicate=3"], "parallel.replicate=3 does not divide the 2 ranks: set it to one of 1, 2"),
        (["parallel=tensor"], "parallel=tensor has plans for transformers"),
        (["parallel=tensor", "model=gpt", "data=stdlib", "loss=next_token", "parallel.size=3"], "does not divide the 2 ranks"),
        (["parallel=pipeline", "parallel.stages=3"], "parallel.stages=3 does not divide the 2 ranks"),
        (["parallel=pipeline", "parallel.shard_stages=true"], "has nothing to shard because all 2 ranks are one pipeline"),
        (["parallel=pipeline", "parallel.tensor=2"], "parallel.tensor=2 has plans for transformers"),
        (["parallel=pipeline", "parallel.tensor=3"], "parallel.tensor=3 does not divide the 2 ranks"),
        (
            ["parallel=pipeline", "parallel.nproc=4", "parallel.stages=2", "parallel.shard_stages=true", "data.drop_last=false"],
            "parallel.shard_stages=true needs all updates to be equal, and data.drop_last=false leaves a short one",
        ),
        (
            ["parallel=pipeline", "parallel.nproc=4", "parallel.stages=2", "parallel.shard_stages=true", "batch=bucketed"],
            "parallel.shard_stages=true needs micro-batches of equal shape, and batch=bucketed has many lengths",
        ),
        (["parallel=tensor", "debug=anomaly"], "debug=anomaly and parallel=tensor exclude each other"),
        (["parallel=pipeline", "batch.preallocate=true"], "batch.preallocate=true and parallel=pipeline exclude each other"),
        (["parallel=dp", "checkpointing=blocks"], "checkpointing=blocks and parallel=dp exclude each other"),
        (["parallel=pipeline", "parallel.schedule=interleaved"], "needs micro-batches in multiples of the 2 stages"),
        (["parallel=pipeline", "precision=bf16_pure"], "both keep copies of the weights"),
        (["parallel=fsdp", "batch.global_batch=7"], "batch.global_batch=7 does not divide into 1 steps × 2 ranks"),
        (["parallel=split"], "parallel=split needs two devices"),
        (["parallel=split", "parallel.devices=[cpu]"], "splitting takes at least two devices"),
        (["parallel=split", "parallel.devices=[cpu,disk]"], "'disk' is no device"),
        (["parallel=fspd"], "fsdp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be(refused: Callable[..., str], words: list[str], says: str) -> None:
    parallel = [] if any(w.startswith("parallel=") for w in words) else ["parallel=ddp"]
    assert says in refused("train", "-q", "data=digits", "runtime.device=cpu", *parallel, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("data=digits", "parallel=pipeline", "parallel.nproc=3", "parallel.block=Residual", "batch.global_batch=120"),
            "parallel=pipeline: 3 stages, but the model is a sequence of 2 blocks: set parallel.stages to 2 or less (and "
            "parallel.nproc with it)",
        ),
        (  # more heads than ranks, but no multiple of them
            ("data=stdlib", "data.max_files=5", "data.length=32", "loss=next_token", "model=gpt", "model.width=48",
             "model.depth=2", "model.heads=3", "parallel=tensor"),
            "a block's 3 heads do not divide into 2 ranks: shard it over 1 (parallel.size; of a pipeline parallel.tensor)",
        ),
        (  # it adds to what its blocks give: stages would lose that, and nobody would be told
            ("data=digits", "model=own", "model.target=faulty_nets.Summing", "trust=[faulty_nets]", "parallel=pipeline"),
            "parallel=pipeline cannot cut this model: its sequence of 3 Linear does not only pass on",
        ),
    ],
    ids=["more stages than blocks", "heads that do not divide", "a sum after the blocks"],
)  # fmt: skip
def test_what_the_model_shows_is_said_once_by_all_ranks(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    shutil.copy(command.HERE / "faulty_nets.py", tmp_path)
    done = train(*words, "runtime.device=cpu", cwd=tmp_path, code=2)
    (line,) = done.errors
    assert line.startswith(f"error: {says}")
    assert {p.name for p in tmp_path.iterdir()} <= {"faulty_nets.py", "__pycache__"}, "nothing written"


# --- ranks: started by us, by torchrun, or from Python; one run directory and one result, and the same training each time ---


ONE_EPOCH = (*TINY, "optimizer=sgd", "optimizer.lr=0.05", "epochs=1", "batch=accumulate", "batch.accumulation_steps=2")
TWO_RANKS = (*ONE_EPOCH, "parallel=ddp")


def trained(run_dir: Path, ranks: int) -> None:
    """It really ran, on so many ranks, to its end."""
    left = result(run_dir)
    assert (left["status"], left["error"], left["updates"], left["world_size"]) == ("completed", None, 8, ranks)
    assert [u for u, *_ in losses(run_dir)] == list(range(1, 9)), "each update is logged once"
    assert [record["set"] for record in records(run_dir, "evaluate")] == ["validation", "test"]
    assert [p.name for p in checkpoints(run_dir)] == ["8"]


@pytest.fixture(scope="module")
def own_launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """parallel=ddp, its two ranks started by the command."""
    place = tmp_path_factory.mktemp("ours")
    train(*TWO_RANKS, cwd=place, code=0)
    return only_run(place / "outputs")


@pytest.mark.slow
def test_torchrun(own_launcher: Path, tmp_path: Path) -> None:
    """torchrun's ranks are taken, none are added; the training is the same bit for bit."""
    done = run("train", "-q", *TWO_RANKS, cwd=tmp_path, how=TORCHRUN, code=0)
    run_dir = only_run(tmp_path / "outputs")
    trained(run_dir, 2)
    assert losses(run_dir) == losses(own_launcher)
    assert weights(run_dir) == weights(own_launcher)
    assert result(run_dir)["config_hash"] == result(own_launcher)["config_hash"]
    assert done.out.count("test accuracy") == 1, "one rank speaks"


@pytest.mark.slow
def test_torchruns_ranks_write_their_parts_to_one_directory(own_launcher: Path, tmp_path: Path) -> None:
    """Rank 0 alone knows it at first."""
    run("train", "-q", *ONE_EPOCH, "parallel=fsdp", "saving.sharded=true", cwd=tmp_path, how=TORCHRUN, code=0)
    run_dir = only_run(tmp_path / "outputs")
    (checkpoint,) = checkpoints(run_dir)
    assert {"__0_0.distcp", "__1_0.distcp"} <= {p.name for p in checkpoint.iterdir()}
    assert not list(run_dir.glob(".seen-*"))


@pytest.mark.slow
def test_ranks_agree_on_the_run_that_goes_on(own_launcher: Path, tmp_path: Path) -> None:
    """torchrun with resume=auto: a rank that looks later, when the first already holds the run, goes on with the same."""
    late = empty(tmp_path / "late")
    (late / "sitecustomize.py").write_text("import os, time\nif os.environ.get('LOCAL_RANK') == '1':\n    time.sleep(8)\n")
    words, env = (*TWO_RANKS[:-1], "parallel=ddp", "parallel.timeout_s=240", "epochs=2"), {"PYTHONPATH": str(late)}
    done = train(*words, "updates=11", cwd=tmp_path, code=0)
    run_dir = only_run(tmp_path / "outputs")
    (run_dir / "result.json").unlink()  # as if it had been killed
    done = run("train", "-q", *words, "updates=11", "resume=auto", cwd=tmp_path, how=TORCHRUN, env=env, code=0)
    assert "resuming from" in done.err
    assert runs(tmp_path / "outputs") == [run_dir]
    assert result(run_dir)["updates"] == 11


@pytest.mark.parametrize("place", ["outputs", pytest.param("crank-ranks", marks=pytest.mark.slow)])
def test_a_rank_that_fails_is_named_once(place: str, here: Path) -> None:
    """Exit 1, the rank and its error on one line, the same in result.json, the traceback in log.txt; the other rank ends."""
    done = train(*OWN, "model.target=my_nets.RaisesOnRank1", "parallel=ddp", "epochs=1", f"output_dir={place}", cwd=here, code=1)
    run_dir = only_run(here / place)
    left = result(run_dir)
    assert (left["status"], left["world_size"]) == ("failed", 2)
    assert re.match(r"rank 1: my_nets\.py:\d+: raise .*: RuntimeError: this one is unwell", left["error"])
    assert done.err.count("RuntimeError: this one is unwell") == 1
    assert "this one is unwell" in (run_dir / "log.txt").read_text()


def test_a_signal_between_two_forks_leaves_no_rank() -> None:
    ranks: list[Any] = []

    def start() -> None:
        ranks.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)))
        ranks[0].start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Gate().around(start)()
    ranks[0].join(20)
    assert ranks[0].exitcode == -signal.SIGKILL


def test_ranks_begin_when_all_of_this_machine_are_forked() -> None:
    """One that begins lets the launcher look up a name, in a lock that a rank forked at this moment would wait for for ever."""
    gate, (began, told) = Gate(), os.pipe()

    def rank() -> int:
        if not (pid := os.fork()):
            gate.wait()
            os.write(told, b"x")
            os._exit(0)
        return pid

    def start() -> list[int]:
        ranks = [rank(), rank()]
        assert not select.select([began], [], [], 0.1)[0]
        return ranks

    assert [os.waitpid(pid, 0)[1] for pid in gate.around(start)()] == [0, 0]
    assert os.read(began, 3) == b"xx"
    os.close(began)
    os.close(told)


def test_a_rank_that_dies(here: Path) -> None:
    done = train(*OWN, "model.target=my_nets.KilledOnRank1", "parallel=ddp", "epochs=1", cwd=here, code=1)
    left = result(only_run(here / "outputs"))
    assert left["status"] == "failed"
    assert "rank 1" in left["error"]
    assert "rank 1" in done.err
    assert "rank 0" not in left["error"], "its failure is a consequence"


# --- several machines: network namespaces joined by a cable, the same command in each ---


OF_MACHINES = (
    "data=digits",
    "model=mlp",
    "model.hidden=[16]",
    "log_every=1",
    "epochs=2",
    "runtime.device=cpu",
    "runtime.threads=1",
)


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
        return [hosts.start(n, places[n], *OF_MACHINES, *meet, *words, *(of_b if n else ())) for n in (0, 1)]

    return begin


def runs_of(places: list[Path]) -> list[Path]:
    return [run for place in places for run in command.runs(place / "outputs")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_machines_train_as_one(together: Together, places: list[Path], tmp_path: Path, strategy: str) -> None:
    ended = [command.finish(p) for p in together(f"parallel={strategy}")]
    assert [done.code for done in ended] == [0, 0], ended
    (run_dir,) = runs_of(places)  # one of them has it
    assert result(run_dir)["world_size"] == 2
    train(*OF_MACHINES, cwd=command.empty(tmp_path / "alone"), code=0)
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
    until(lambda: [c for run in runs_of(places) for c in command.checkpoints(run)], lambda: [p.poll() for p in begun])
    hosts.cut()
    ended = [command.finish(p) for p in begun]
    (run_dir,) = runs_of(places)
    first = next(n for n, place in enumerate(places) if run_dir.is_relative_to(place))
    assert ended[first].code == 75, ended
    assert any("the ranks of another machine are gone" in e and "go on with resume=" in e for e in ended[first].errors)
    assert ended[1 - first].code != 0
    assert result(run_dir)["status"] == "interrupted"
    updates = int(command.checkpoints(run_dir)[-1].name)
    words = ("parallel=single", "resume_changed=true", f"updates={updates + 3}")
    train(f"resume={run_dir}", *words, cwd=places[first], code=0)
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
    words = [w for w in OF_MACHINES if not w.startswith("model")]
    train(*words, *faulty, cwd=alone, code=0)
    once = command.empty(tmp_path / "struck") / "once"
    for name, value in (("FAULT", "killed"), ("FAULT_AT", "9"), ("FAULT_RANK", "1"), ("FAULT_ONCE", str(once))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.modules[__name__], "OF_MACHINES", tuple(words))
    ended = [command.finish(p) for p in together(*faulty, "parallel.max_restarts=1")]
    assert [done.code for done in ended] == [0, 0], ended
    assert once.exists()
    assert sum("all start again from" in done.err for done in ended) == 1
    (run_dir,) = runs_of(places)
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
    assert not runs_of(places)
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
        ended = [command.finish(hosts.start(n, places[n], *OF_MACHINES, "parallel=ddp", *meet)) for n in (0, 1)]
    finally:
        command.kill_all(other)
        other.communicate()
    assert [done.code for done in ended] == [2, 2], ended
    assert "port 29500 of this machine is in use by something else" in ended[0].err
    assert "the answer there is not from one of this run's machines" in ended[1].err
    assert all(len(done.err.splitlines()) == 1 for done in ended), ended
