"""Ranks: started by us, by torchrun, or from Python; one run directory and one result, and the same training each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


def tensors(run_dir: Path) -> dict[str, object]:
    import safetensors.torch

    return safetensors.torch.load_file(checkpoints(run_dir)[-1] / "model.safetensors")


@pytest.fixture(scope="module")
def own_launcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """parallel=ddp, its two ranks started by the command."""
    place = tmp_path_factory.mktemp("ours")
    done = train(*DDP, cwd=place)
    assert done.code == 0, done
    return only_run(place / "outputs")


def test_two_ranks_are_one_process_with_the_whole_batch(own_launcher: Path, tmp_path: Path) -> None:
    import torch

    done = train(*WORDS, cwd=tmp_path)
    assert done.code == 0, done
    single = only_run(tmp_path / "outputs")
    trained(single, 1)
    trained(own_launcher, 2)
    alone, together = tensors(single), tensors(own_launcher)
    assert list(alone) == list(together), "plain names on any number of ranks"
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-6)
    assert [loss for _, _, loss, *_ in losses(own_launcher)] == pytest.approx([x for _, _, x, *_ in losses(single)], rel=1e-4)
    evaluated = result(own_launcher)["metrics"]["test"]["final"]
    assert evaluated == pytest.approx(result(single)["metrics"]["test"]["final"], rel=1e-4)


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


ONE_OF_TWO = {
    "WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


def test_torchrun_and_one_process_exclude_each_other(tmp_path: Path) -> None:
    done = train(*WORDS, "parallel=single", cwd=tmp_path, env=ONE_OF_TWO)
    assert done.code == 2, done
    assert "parallel=single" in done.err
    assert "set parallel=ddp" in done.err
    assert not list(tmp_path.iterdir())


def test_torchrun_and_another_number_of_ranks(tmp_path: Path) -> None:
    done = train(*DDP, "parallel.nproc=4", cwd=tmp_path, env=ONE_OF_TWO)
    assert done.code == 2, done
    assert "parallel.nproc=4" in done.err
    assert "2 ranks" in done.err
    assert not list(tmp_path.iterdir())


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


def test_a_launcher_of_one(tmp_path: Path) -> None:
    """WORLD_SIZE=1 alone, as some clusters set it, is one process."""
    done = train(*TINY, "updates=1", cwd=tmp_path, env={"WORLD_SIZE": "1"})
    assert done.code == 0, done
    assert result(only_run(tmp_path / "outputs"))["updates"] == 1


def test_a_launcher_that_makes_no_sense(tmp_path: Path) -> None:
    done = train(*TINY, "updates=1", "parallel=ddp", cwd=tmp_path, env={"WORLD_SIZE": "two"})
    assert done.code == 2, done
    assert "WORLD_SIZE" in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["outputs", pytest.param("crank-ranks", marks=pytest.mark.slow)])
def test_a_rank_that_fails_is_named_once(place: str, tmp_path: Path) -> None:
    """Exit 1, the rank and its error on one line, the same in result.json, the traceback in log.txt; the other rank ends."""
    cwd = with_own_nets(tmp_path / "here")
    done = train(*OWN, "model.target=my_nets.RaisesOnRank1", "parallel=ddp", "epochs=1", f"output_dir={place}", cwd=cwd)
    assert done.code == 1, done
    run_dir = only_run(cwd / place)
    left = result(run_dir)
    assert (left["status"], left["world_size"]) == ("failed", 2)
    assert left["error"].startswith("rank 1: RuntimeError: this one is unwell")
    assert done.err.count("this one is unwell") == 1
    assert "rank 1: RuntimeError: this one is unwell" in done.err
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

SCRIPT = """
import json, sys, time
import drivetrain
from drivetrain.core.errors import UserError

for words in json.loads(sys.argv[1]):
    began = time.time()
    try:
        result = drivetrain.train(words)
    except UserError as error:
        print(json.dumps({"problems": error.problems}))
        continue
    print(json.dumps({
        "status": result.status, "error": result.error, "updates": result.updates, "world_size": result.world_size,
        "metrics": result.metrics, "run_dir": str(result.run_dir), "config_hash": result.config_hash,
        "wall_s": result.wall_s, "to_first": result.time_to_first_step_s, "outside_s": time.time() - began,
    }))
"""


def from_python(place: Path, *calls: list[str]) -> tuple[list[dict[str, object]], Done]:
    """Call drivetrain.train for each list of words, in one process; what came back."""
    (place / "script.py").write_text(SCRIPT)
    done = run(json.dumps(calls), cwd=place, how=("script.py",))
    assert done.code == 0, done
    return [json.loads(line) for line in done.out.splitlines() if line.startswith('{"')], done


@pytest.mark.slow
def test_from_python(own_launcher: Path, tmp_path: Path) -> None:
    """One process, two ranks, a bad config and a run that fails, one after the other, as from the command line."""
    place = with_own_nets(tmp_path / "here")
    single, ddp, bad, failing = from_python(
        place, list(WORDS), list(DDP), ["precision=ampp", "epochs=0"],
        [*OWN, "model.target=my_nets.Raises", "epochs=1"],
    )[0]  # fmt: skip
    for came, ranks in ((single, 1), (ddp, 2)):
        trained(Path(place / str(came["run_dir"])), ranks)
        on_disk = result(place / str(came["run_dir"]))
        assert all(came[key] == on_disk[key] for key in ("status", "error", "updates", "world_size", "metrics", "config_hash"))
    assert weights(place / str(ddp["run_dir"])) == weights(own_launcher)
    assert [p for p in bad["problems"] if "precision=ampp" in p]  # type: ignore[union-attr, attr-defined]
    assert [p for p in bad["problems"] if "epochs=0" in p]  # type: ignore[union-attr, attr-defined]
    assert failing["status"] == "failed"
    assert "the third forward is too much" in str(failing["error"])
    assert len(runs(place / "outputs")) == 3


@pytest.mark.slow
def test_a_second_run_of_a_process_has_its_own_clock(tmp_path: Path) -> None:
    """Its times begin when it is called, not when the package was imported."""
    (_, second), _ = from_python(tmp_path, [*WORDS], [*TINY, "updates=1"])
    assert second["status"] == "completed"
    assert 0 < second["to_first"] <= second["wall_s"] <= second["outside_s"]  # type: ignore[operator]
