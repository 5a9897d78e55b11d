"""Ranks: started by us, by torchrun, or from Python; one run directory and one result, and the same training each time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command import (
    OWN,
    TINY,
    TORCHRUN,
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
    with_own_nets,
)  # fmt: skip

WORDS = (*TINY, "optimizer=sgd", "optimizer.lr=0.05", "epochs=1", "batch=accumulate", "batch.accumulation_steps=2")
DDP = (*WORDS, "parallel=ddp")


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
    done = train(*DDP, cwd=place)
    assert done.code == 0, done
    return only_run(place / "outputs")


@pytest.mark.slow
def test_torchrun(own_launcher: Path, tmp_path: Path) -> None:
    """torchrun's ranks are taken, none are added; the training is the same bit for bit."""
    done = run("train", "-q", *DDP, cwd=tmp_path, how=TORCHRUN)
    assert done.code == 0, done
    run_dir = only_run(tmp_path / "outputs")
    trained(run_dir, 2)
    assert losses(run_dir) == losses(own_launcher)
    assert weights(run_dir) == weights(own_launcher)
    assert result(run_dir)["config_hash"] == result(own_launcher)["config_hash"]
    assert done.out.count("test accuracy") == 1, "one rank speaks"


@pytest.mark.slow
def test_torchruns_ranks_write_their_parts_to_one_directory(own_launcher: Path, tmp_path: Path) -> None:
    """Rank 0 alone knows it at first."""
    done = run("train", "-q", *WORDS, "parallel=fsdp", "saving.sharded=true", cwd=tmp_path, how=TORCHRUN)
    assert done.code == 0, done
    run_dir = only_run(tmp_path / "outputs")
    (checkpoint,) = checkpoints(run_dir)
    assert {"__0_0.distcp", "__1_0.distcp"} <= {p.name for p in checkpoint.iterdir()}
    assert not list(run_dir.glob(".seen-*"))


@pytest.mark.slow
def test_ranks_agree_on_the_run_that_goes_on(own_launcher: Path, tmp_path: Path) -> None:
    """torchrun with resume=auto: a rank that looks later, when the first already holds the run, goes on with the same."""
    late = empty(tmp_path / "late")
    (late / "sitecustomize.py").write_text("import os, time\nif os.environ.get('LOCAL_RANK') == '1':\n    time.sleep(8)\n")
    words = (*DDP[:-1], "parallel=ddp", "parallel.timeout_s=240", "epochs=2")
    done = train(*words, "updates=11", cwd=tmp_path)
    assert done.code == 0, done
    run_dir = only_run(tmp_path / "outputs")
    (run_dir / "result.json").unlink()  # as if it had been killed
    done = run("train", "-q", *words, "updates=11", "resume=auto", cwd=tmp_path, how=TORCHRUN, env={"PYTHONPATH": str(late)})
    assert done.code == 0, done
    assert "resuming from" in done.err
    assert runs(tmp_path / "outputs") == [run_dir]
    assert result(run_dir)["updates"] == 11


@pytest.mark.parametrize("place", ["outputs", pytest.param("crank-ranks", marks=pytest.mark.slow)])
def test_a_rank_that_fails_is_named_once(place: str, tmp_path: Path) -> None:
    """Exit 1, the rank and its error on one line, the same in result.json, the traceback in log.txt; the other rank ends."""
    cwd = with_own_nets(tmp_path / "here")
    done = train(*OWN, "model.target=my_nets.RaisesOnRank1", "parallel=ddp", "epochs=1", f"output_dir={place}", cwd=cwd)
    assert done.code == 1, done
    run_dir = only_run(cwd / place)
    left = result(run_dir)
    assert (left["status"], left["world_size"]) == ("failed", 2)
    assert re.match(r"rank 1: my_nets\.py:\d+: raise .*: RuntimeError: this one is unwell", left["error"])
    assert done.err.count("RuntimeError: this one is unwell") == 1
    assert "Traceback" not in done.err + done.out
    assert "this one is unwell" in (run_dir / "log.txt").read_text()


def test_a_rank_that_dies(tmp_path: Path) -> None:
    cwd = with_own_nets(tmp_path / "here")
    done = train(*OWN, "model.target=my_nets.KilledOnRank1", "parallel=ddp", "epochs=1", cwd=cwd)
    assert done.code == 1, done
    left = result(only_run(cwd / "outputs"))
    assert left["status"] == "failed"
    assert "rank 1" in left["error"]
    assert "rank 1" in done.err
    assert "rank 0" not in left["error"], "its failure is a consequence"


# From Python: drivetrain.train([...]).
