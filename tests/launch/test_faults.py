"""The end of a run on several ranks when something happens to one of them."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from drivetrain.cli import main
from tests.support import command
from tests.support.command import TORCHRUN, Done, losses, only_run, result, train, weights

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
    place: Path, fault: str, rank: int, *words: str, at: int = 9, how: Sequence[str] = command.DRIVETRAIN
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
    return place / "outputs", train(*WORDS, "parallel.timeout_s=3600", *words, cwd=place, env=about, how=how)


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("ddp", 1), *(pytest.param(*both, marks=pytest.mark.slow) for both in (("ddp", 0), ("fsdp", 0), ("fsdp", 1)))],
)
def test_a_killed_rank_and_all_start_again(whole: Path, tmp_path: Path, rank: int, strategy: str) -> None:
    """From the newest checkpoint, and to the end bit for bit as if nothing had been."""
    outputs, done = faulted(tmp_path, "killed", rank, f"parallel={strategy}", "parallel.max_restarts=1")
    assert done.code == 0, done
    assert f"rank {rank} ended without a result (killed, or out of memory): all start again from" in done.err
    assert "(restart 1)" in done.err
    run_dir = only_run(outputs)
    assert result(run_dir)["updates"] == UPDATES
    assert [update for update, *_ in losses(run_dir)] == list(range(1, UPDATES + 1)), "none lost, none twice"
    if strategy == "ddp":
        assert losses(run_dir) == losses(whole)
        assert weights(run_dir) == weights(whole)


def test_a_stopped_rank_is_found_named_and_shown(tmp_path: Path) -> None:
    outputs, done = faulted(tmp_path, "stopped", 1, "parallel.heartbeat_timeout_s=3")
    run_dir = only_run(outputs)
    assert done.code == 1, done
    (line,) = {e for e in done.errors if "rank 1" in e}
    assert "rank 1 gave no heartbeat for" in line
    assert "stopped (SIGSTOP)" in line
    assert f"go on with resume={run_dir}" in line or f"resume={run_dir.relative_to(tmp_path)}" in line
    stack = (run_dir / "ranks" / "1.stack").read_text()
    assert "faulty_nets.py" in stack
    assert "in stopped" in stack


@pytest.mark.slow
def test_a_stopped_rank_and_all_start_again(whole: Path, tmp_path: Path) -> None:
    outputs, done = faulted(tmp_path, "stopped", 0, "parallel.heartbeat_timeout_s=3", "parallel.max_restarts=1")
    assert done.code == 0, done
    run_dir = only_run(outputs)
    assert weights(run_dir) == weights(whole)
    assert "rank 0 gave no heartbeat for" in done.err
    assert "all start again from" in done.err
    assert "in stopped" in (run_dir / "ranks" / "0.stack").read_text(), "it stays"


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_one_ranks_nan_is_all_ranks(tmp_path: Path, strategy: str) -> None:
    outputs, done = faulted(tmp_path, "not_a_number", 1, f"parallel={strategy}", "parallel.max_restarts=2")
    assert done.code == 3, done
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
    first = train(*words, "output_dir=one", cwd=tmp_path)
    assert first.code == 0, first
    part = train(*words, "updates=5", "output_dir=many", cwd=tmp_path)
    assert part.code == 0, part
    run_dir = only_run(tmp_path / "many")
    for updates, ranks in ((14, 1), (UPDATES, 2)):
        done = train(f"resume={run_dir}", "resume_changed=true", f"parallel.nproc={ranks}", f"updates={updates}", cwd=tmp_path)
        assert done.code == 0, done
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
    _, done = faulted(tmp_path, "", 0, *meet)
    assert done.code == 2, done
    assert "parallel.rendezvous=127.0.0.1:29871: 2 machines did not meet within 1 s" in done.err
    assert "Traceback" not in done.err
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
        (["parallel.max_restarts=3", "saving=none"], "parallel.max_restarts=3 has nothing to start again from"),
        (["parallel=fsdp", "parallel.replicate=3"], "parallel.replicate=3 does not divide the 2 ranks: set it to one of 1, 2"),
        (["parallel=tensor"], "parallel=tensor has plans for transformers"),
        (["parallel=tensor", "model=gpt", "data=stdlib", "loss=next_token", "parallel.size=3"], "does not divide the 2 ranks"),
        (["parallel=pipeline", "parallel.stages=3"], "parallel.stages=3 does not divide the 2 ranks"),
        (["parallel=pipeline", "parallel.shard_stages=true"], "has nothing to share out where all 2 ranks are one pipeline"),
        (["parallel=pipeline", "parallel.tensor=2"], "parallel.tensor=2 has plans for transformers"),
        (["parallel=pipeline", "parallel.tensor=3"], "parallel.tensor=3 does not divide the 2 ranks"),
        (
            ["parallel=pipeline", "parallel.nproc=4", "parallel.stages=2", "parallel.shard_stages=true", "data.drop_last=false"],
            "parallel.shard_stages=true needs all updates to be equal, and data.drop_last=false leaves a short one",
        ),
        (["parallel=tensor", "debug=anomaly"], "debug=anomaly and parallel=tensor exclude each other"),
        (["parallel=pipeline", "batch.preallocate=true"], "batch.preallocate=true and parallel=pipeline exclude each other"),
        (["parallel=dp", "checkpointing=blocks"], "checkpointing=blocks and parallel=dp exclude each other"),
        (["parallel=pipeline", "parallel.schedule=interleaved"], "wants micro-batches in multiples of the 2 stages"),
        (["parallel=pipeline", "precision=bf16_pure"], "both keep weights of their own"),
        (["parallel=fsdp", "batch.global_batch=7"], "batch.global_batch=7 does not divide into 1 steps × 2 ranks"),
        (["parallel=split"], "parallel=split needs two devices"),
        (["parallel=split", "parallel.devices=[cpu]"], "splitting takes two devices at least"),
        (["parallel=split", "parallel.devices=[cpu,disk]"], "'disk' is no device"),
        (["parallel=fspd"], "fsdp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be(tmp_path: Path, monkeypatch, capsys, words: list[str], says: str) -> None:
    monkeypatch.chdir(tmp_path)
    parallel = [] if any(w.startswith("parallel=") for w in words) else ["parallel=ddp"]
    assert main.main(["train", "-q", "data=digits", "runtime.device=cpu", *parallel, *words]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing written"


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
    done = train(*words, "runtime.device=cpu", cwd=tmp_path)
    assert done.code == 2, done
    (line,) = done.errors
    assert line.startswith(f"error: {says}")
    assert "Traceback" not in done.err
    assert {p.name for p in tmp_path.iterdir()} <= {"faulty_nets.py", "__pycache__"}, "nothing written"
