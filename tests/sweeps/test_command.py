"""`-m`: each combination is a run of its own; one that fails takes nothing with it, and the exit code and the table say so."""

from __future__ import annotations

import itertools
import json
import re
import signal
from pathlib import Path

import pytest

from drivetrain.sweeps import prepare
from tests.support.command import (
    OWN,
    ROOT,
    SRC_TRAIN,
    TINY,
    Done,
    at_the_gate,
    checkpoints,
    finish,
    result,
    run,
    train,
    with_own_nets,
)  # fmt: skip

SMALL = (*TINY, "updates=3")


def jobs(root: Path) -> list[Path]:
    """The directories of the one sweep below an output_dir, in the order of its jobs."""
    (sweep,) = root.glob("multirun/*/*")
    listed = json.loads((sweep / "jobs.json").read_text())["jobs"]
    found = sorted((p for p in sweep.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    assert [int(p.name) for p in found] == [entry["job"] for entry in listed]
    return found


def table(done: Done) -> list[str]:
    """The lines of the final table, one a job."""
    lines = done.out.splitlines()
    (head,) = (n for n, line in enumerate(lines) if "overrides" in line and "status" in line)
    return list(itertools.takewhile(str.strip, lines[head + 1 :]))


def assert_whole(run_dir: Path, updates: int) -> None:
    """A job that went to its end."""
    assert result(run_dir)["status"] == "completed"
    assert result(run_dir)["updates"] == updates
    assert checkpoints(run_dir)[-1].name == str(updates)
    assert (run_dir / "recipe.yaml").is_file()
    assert (run_dir / "metrics.jsonl").is_file()


def test_two_by_two(tmp_path: Path) -> None:
    """From the checkout: four results, a table, exit 0."""
    axes = ("precision=fp32,bf16_pure", "optimizer=sgd,adamw")
    done = run("-q", "-m", *SMALL, *axes, f"output_dir={tmp_path / 'runs'}", cwd=ROOT, how=SRC_TRAIN)
    assert done.code == 0, done
    left = jobs(tmp_path / "runs")
    combinations = [["precision=fp32", "optimizer=sgd"], ["precision=fp32", "optimizer=adamw"],
                    ["precision=bf16_pure", "optimizer=sgd"], ["precision=bf16_pure", "optimizer=adamw"]]  # fmt: skip
    assert len(left) == 4
    for run_dir, words, row in zip(left, combinations, table(done), strict=True):
        assert_whole(run_dir, 3)
        assert [w for w in result(run_dir)["overrides"] if w.startswith(("precision=", "optimizer="))] == words
        assert all(f"override /{w.replace('=', ': ')}\n" in (run_dir / "recipe.yaml").read_text() for w in words)
        assert " ".join(words) in row
        assert "completed" in row
    assert len({result(run_dir)["config_hash"] for run_dir in left}) == 4
    assert len({result(run_dir)["metrics"]["test"]["final"]["loss"] for run_dir in left}) == 4, "they really differ"


def test_a_job_is_the_run_that_it_is_alone(tmp_path: Path) -> None:
    """Forked after others, it trains bit for bit as in a process of its own."""
    done = train("-m", *SMALL, "optimizer=sgd,adamw", "model.dropout=0.2", cwd=tmp_path)
    assert done.code == 0, done
    second = jobs(tmp_path / "outputs")[1]
    alone = train(*SMALL, "optimizer=adamw", "model.dropout=0.2", "output_dir=alone", cwd=tmp_path)
    assert alone.code == 0, alone
    (single,) = (tmp_path / "alone").glob("*/*")
    assert result(single)["metrics"] == result(second)["metrics"]
    assert result(single)["config_hash"] == result(second)["config_hash"]
    assert result(single)["updates"] == 3


def test_failing_jobs_leave_the_others_whole(tmp_path: Path) -> None:
    """One that dies without a word, one that is killed, one that raises, one that diverges: each is told, none spreads."""
    nets = ("Net", "Dies", "Killed", "Raises", "Diverges", "Noted", "Gated")
    done = train(
        "-m", *OWN, "updates=5", f"model.target={','.join(f'my_nets.{n}' for n in nets)}", cwd=with_own_nets(tmp_path / "here")
    )
    left, rows = jobs(tmp_path / "here" / "outputs"), table(done)
    assert len(left) == len(nets)
    expected = {  # net: status, what its error says
        "Dies": ("failed", "9"), "Killed": ("failed", "signal 9"), "Raises": ("failed", "the third forward is too much"),
        "Diverges": ("diverged", "nan"), "Noted": ("failed", "note"),
    }  # fmt: skip
    for net, run_dir in zip(nets, left, strict=True):
        (row,) = (r for r in rows if f"my_nets.{net} " in r)
        if net not in expected:
            assert_whole(run_dir, 5)
            assert "completed" in row
            continue
        status, reason = expected[net]
        assert result(run_dir)["status"] == status
        assert reason in result(run_dir)["error"]
        assert f"model.target=my_nets.{net}" in result(run_dir)["overrides"]
        assert status in row
    assert done.code == 1, "several kinds of failure"
    assert f"5 of {len(nets)} jobs did not complete" in done.err
    assert "Traceback" not in done.err + done.out


def test_a_bad_value_and_a_bad_recipe_on_an_axis(tmp_path: Path) -> None:
    """They are their jobs': exit 2, the others are whole, and train after all mistakes are told."""
    done = train("-m", *SMALL, "optimizer.lr=0.01,-1", "recipe=default,nope", cwd=tmp_path)
    assert done.code == 2, done
    ends = [line.split()[1] for line in done.out.splitlines() if re.match(r"job \d+ \(\d+ of 4\)", line)]
    assert ends == ["1", "2", "3", "0"]
    left = jobs(tmp_path / "outputs")
    assert [result(run_dir)["status"] for run_dir in left] == ["completed", "failed", "failed", "failed"]
    assert_whole(left[0], 3)
    assert "recipe=nope" in result(left[1])["error"]
    assert "optimizer.lr=-1" in result(left[2])["error"]
    assert "optimizer.lr=-1: must be > 0" in done.err
    assert "3 of 4 jobs did not complete" in done.err
    assert len(table(done)) == 4


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("precision=nope,nopf",), ("precision=nope", "precision=nopf")),
        (("epochs=1,2", "optimizer.lrr=3"), ("optimizer.lrr=3",)),
    ],
)
def test_nothing_but_bad_jobs(words: tuple[str, ...], names: tuple[str, ...], tmp_path: Path) -> None:
    """Exit 2, every reason once, and nothing is written."""
    done = train("-m", *words, cwd=tmp_path)
    assert done.code == 2, done
    assert [done.err.count(name) for name in names] == [1] * len(names), done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_process_or_two(tmp_path: Path) -> None:
    """parallel=single,ddp: the ranks are started within the sweep, and only split the work."""
    done = train("-m", *TINY, "parallel=single,ddp", "optimizer=sgd", "epochs=1", cwd=tmp_path)
    assert done.code == 0, done
    single, ddp = jobs(tmp_path / "outputs")
    assert_whole(single, 8)
    assert_whole(ddp, 8)
    assert [result(d)["world_size"] for d in (single, ddp)] == [1, 2]
    alone, together = (result(d)["metrics"]["validation"]["final"] for d in (single, ddp))
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_sweep_recipe_runs_as_a_sweep(tmp_path: Path) -> None:
    """recipe=speed_ladder without -m; what the command line gives is no axis any more."""
    assert len({made.job.config_hash for made in prepare(["recipe=speed_ladder"]) if made.job}) == 8
    done = train("recipe=speed_ladder", "data=digits", "model=resnet9", "updates=2", "optimizer.fused=true", cwd=tmp_path)
    assert done.code == 0, done
    left = jobs(tmp_path / "outputs")
    assert len(left) == len(table(done)) == 4
    for run_dir in left:
        assert_whole(run_dir, 2)
        assert "optimizer.fused=true" in result(run_dir)["overrides"]
    given = [{w for w in result(d)["overrides"] if w.startswith(("precision=", "surgery="))} for d in left]
    assert len({frozenset(words) for words in given}) == 4


def test_a_range_and_a_job_that_is_gone_on_with(tmp_path: Path) -> None:
    done = train("-m", *TINY, "scheduler=constant", "epochs=range(1,3)", cwd=tmp_path)
    assert done.code == 0, done
    left = jobs(tmp_path / "outputs")
    assert [(result(d)["updates"], result(d)["epochs"]) for d in left] == [(8, 1.0), (16, 2.0)]
    assert [f"epochs={n}" in row for n, row in enumerate(table(done), 1)] == [True, True]
    done = train(f"resume={left[0]}", "epochs=2", cwd=tmp_path)
    assert done.code == 0, done
    assert f"resuming from {left[0] / 'checkpoints' / '8'}" in done.err
    assert_whole(left[0], 16)
    assert result(left[0])["metrics"] == result(left[1])["metrics"], "as if it had never ended"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_sweep_and_keeps_what_there_is(number: int, tmp_path: Path) -> None:
    """The running job saves, no further one starts; exit 75."""
    cwd = with_own_nets(tmp_path / "here")
    words = (*OWN, "model.target=my_nets.Gated", "epochs=1", "optimizer.lr=0.01,0.02,0.03")
    with at_the_gate(cwd, "5", "-m", *words) as (process, go):
        process.send_signal(number)
        go.touch()
        done = finish(process)
    assert done.code == 75, done
    (sweep,) = (cwd / "outputs" / "multirun").glob("*/*")
    assert [p.name for p in sweep.iterdir() if p.is_dir()] == ["0"]
    assert result(sweep / "0")["status"] == "interrupted"
    assert checkpoints(sweep / "0")[-1].name == "5"
    assert len(table(done)) == 1
