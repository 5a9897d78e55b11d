"""`-m`: each combination is a run of its own; one that fails takes nothing with it, and the exit code and the table say so."""

import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.run import directory
from drivetrain.sweeps import launchers
from drivetrain.sweeps.store import prepare
from tests.support.command import (
    OWN,
    ROOT,
    SRC_TRAIN,
    TINY,
    Done,
    at_the_gate,
    checkpoints,
    empty,
    environment,
    finish,
    losses,
    only_run,
    result,
    run,
    start,
    train,
    with_own_nets,
)  # fmt: skip
from tests.support.waiting import LIMIT_S, until

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
    return list(itertools.takewhile(lambda line: line.strip() and not line.startswith("written to "), lines[head + 1 :]))


def assert_whole(run_dir: Path, updates: int) -> None:
    """A job that went to its end."""
    assert result(run_dir)["status"] == "completed"
    assert result(run_dir)["updates"] == updates
    assert checkpoints(run_dir)[-1].name == str(updates)
    assert (run_dir / "recipe.yaml").is_file()
    assert (run_dir / "metrics.jsonl").is_file()


def test_two_by_two(tmp_path: Path) -> None:
    """From the checkout: four results, a table, exit 0. A job is bit for bit the run that it is in a process of its own."""
    axes = ("precision=fp32,bf16_pure", "optimizer=sgd,adamw", "model.dropout=0.2")
    done = run("-q", "-m", *SMALL, *axes, f"output_dir={tmp_path / 'runs'}", cwd=ROOT, how=SRC_TRAIN, code=0)
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
    train(*SMALL, *combinations[-1], "model.dropout=0.2", "output_dir=alone", cwd=tmp_path, code=0)
    single, last = result(only_run(tmp_path / "alone")), result(left[-1])
    assert [single[key] for key in ("metrics", "config_hash")] == [last[key] for key in ("metrics", "config_hash")]


def test_failing_jobs_leave_the_others_whole(tmp_path: Path) -> None:
    """One that dies without a word, one that is killed, one that raises, one that diverges: each is told, none spreads."""
    nets = ("Net", "Dies", "Killed", "Raises", "Diverges", "Noted", "Gated")
    done = train(
        "-m", *OWN, "updates=5", f"model.target={','.join(f'my_nets.{n}' for n in nets)}", cwd=with_own_nets(tmp_path / "here"),
        code=1,  # several kinds of failure
    )  # fmt: skip
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
    assert f"5 of {len(nets)} jobs did not complete" in done.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("precision=nope,nopf",), ("precision=nope", "precision=nopf")),
        (("epochs=1,2", "optimizer.lrr=3"), ("optimizer.lrr=3",)),
        (("optimizer.lr=0.01,-1", "recipe=default,nope"), ("recipe=nope", "optimizer.lr=-1: must be > 0")),
        (("runtime.device=cpu,cuda,xpu",), ("finds no CUDA device", "finds no XPU device")),  # which only this machine has not
    ],
)
def test_all_bad_jobs_are_told_once_before_a_good_one_starts(words: tuple[str, ...], told: tuple[str, ...], refused: Any) -> None:
    said = refused("train", "-m", *SMALL, *words)
    assert [said.count(each) for each in told] == [1] * len(told), said


@pytest.mark.slow
def test_one_process_or_two(tmp_path: Path) -> None:
    """parallel=single,ddp: the ranks are started within the sweep, and only split the work."""
    train("-m", *TINY, "parallel=single,ddp", "optimizer=sgd", "epochs=1", cwd=tmp_path, code=0)
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
    done = train("recipe=speed_ladder", "data=digits", "model=resnet9", "updates=2", "optimizer.fused=true", cwd=tmp_path, code=0)
    left = jobs(tmp_path / "outputs")
    assert len(left) == len(table(done)) == 4
    for run_dir in left:
        assert_whole(run_dir, 2)
        assert "optimizer.fused=true" in result(run_dir)["overrides"]
    given = [{w for w in result(d)["overrides"] if w.startswith(("precision=", "surgery="))} for d in left]
    assert len({frozenset(words) for words in given}) == 4


def test_a_range_and_a_job_that_is_gone_on_with(tmp_path: Path) -> None:
    done = train("-m", *TINY, "scheduler=constant", "epochs=range(1,3)", cwd=tmp_path, code=0)
    left = jobs(tmp_path / "outputs")
    assert [(result(d)["updates"], result(d)["epochs"]) for d in left] == [(8, 1.0), (16, 2.0)]
    assert [f"epochs={n}" in row for n, row in enumerate(table(done), 1)] == [True, True]
    done = train(f"resume={left[0]}", "epochs=2", cwd=tmp_path, code=0)
    assert f"resuming from {left[0] / 'checkpoints' / '8'}" in done.err
    assert_whole(left[0], 16)
    assert result(left[0])["metrics"] == result(left[1])["metrics"], "as if it had never ended"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_sweep_and_keeps_what_there_is(number: int, here: Path) -> None:
    """The running job saves, no further one starts; exit 75."""
    words = (*OWN, "model.target=my_nets.Gated", "epochs=20000", "optimizer.lr=0.01,0.02,0.03")
    with at_the_gate(here, "5", "-m", *words) as (process, go):
        process.send_signal(number)
        go.touch()
        done = finish(process)
    assert done.code == 75, done
    (sweep,) = (here / "outputs" / "multirun").glob("*/*")
    assert [p.name for p in sweep.iterdir() if p.is_dir()] == ["0"]
    stopped = result(sweep / "0")  # where the signal reached it, which the sweep passes on in its own time
    assert stopped["status"] == "interrupted"
    assert int(checkpoints(sweep / "0")[-1].name) == stopped["updates"] >= 5
    assert len(table(done)) == 1


# --- a sweep that ends early and goes on, runs several jobs at a time, hands them to submitit, or searches ---

GATED = ("-m", *OWN, "model.target=my_nets.Gated", "epochs=2", "saving.keep=9")


def the_sweep(root: Path) -> Path:
    (sweep,) = root.glob("outputs/multirun/*/*")
    return sweep


def told(sweep: Path) -> dict[str, Any]:
    """Its sweep.json."""
    return json.loads((sweep / "sweep.json").read_text())


@pytest.mark.slow
def test_a_killed_sweep_goes_on_with_what_is_left(here: Path) -> None:
    """SIGKILL to all of it in the second of three jobs: the first is kept, the second resumes, the third begins."""
    words = ("optimizer=sgd,adamw", "model.target=my_nets.Net,my_nets.Gated")  # the gate is in jobs 1 and 3
    with at_the_gate(here, "14", *GATED, *words) as (_, go):
        pass  # it is killed
    sweep = the_sweep(here)
    assert sorted(p.name for p in sweep.iterdir() if p.is_dir()) == ["0", "1"]
    assert not (sweep / "1" / "result.json").exists()
    before = (sweep / "0" / "result.json").stat().st_mtime_ns
    go.touch()
    done = train("-m", f"resume={sweep}", cwd=here, env={"GATE": str(go.parent)}, code=0)
    assert "1 of 4 jobs are done already" in done.out
    assert f"resuming from {sweep / '1' / 'checkpoints' / '8'}" in done.err
    assert (sweep / "0" / "result.json").stat().st_mtime_ns == before
    for number in range(4):
        assert_whole(sweep / str(number), 16)
    assert result(sweep / "1")["overrides"] == json.loads((sweep / "jobs.json").read_text())["jobs"][1]["overrides"]
    assert losses(sweep / "1") == losses(sweep / "0"), "the same as one that was not killed"
    assert len(table(done)) == 4
    assert told(sweep)["finished"] is True
    assert re.search(r"^best: job \d, validation accuracy 0\.\d+ ", done.out, re.M)
    (command,) = re.findall(r"^  drivetrain train (.*)$", done.out, re.M)
    assert "hydra" not in command
    assert "model.target=my_nets." in command


@pytest.mark.slow
def test_several_at_a_time_and_the_signal_that_stops_them(here: Path) -> None:
    """Both jobs are at the gate at once; SIGTERM saves both; resume=auto goes on; the third has never begun."""
    joblib = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    with at_the_gate(here, "5", *GATED, "runtime.seed=0,1,2", *joblib, ranks=2) as (process, go):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        go.touch()
        done = finish(process)
    sweep = the_sweep(here)
    assert done.code == 75, done
    assert [(result(sweep / n)["status"], result(sweep / n)["updates"]) for n in "01"] == [("interrupted", 5)] * 2
    assert not (sweep / "2").exists()
    assert f"resume by drivetrain train -m resume=outputs/{sweep.relative_to(here / 'outputs')}" in done.err
    assert told(sweep)["finished"] is False
    words = ("runtime.seed=0,1,2", "resume=auto", "hydra/launcher=joblib", "hydra.launcher.n_jobs=3")
    done = train(*GATED, *words, cwd=here, env={"GATE": str(go.parent)}, code=0)
    assert the_sweep(here) == sweep
    for run_dir in jobs(here / "outputs"):
        assert_whole(run_dir, 16)
    assert "5" in [c.name for c in checkpoints(sweep / "0")]
    assert "resuming from" in (sweep / "0" / "output.txt").read_text()


@pytest.mark.slow
def test_submitit_on_this_machine(tmp_path: Path) -> None:
    """Two jobs in processes of submitit's, with the files that any job leaves."""
    words = ("hydra/launcher=submitit_local", "hydra.launcher.array_parallelism=2", "hydra.launcher.timeout_min=5")
    done = train("-m", *SMALL, "optimizer=sgd,adamw", "model.dropout=0.2", *words, cwd=tmp_path, code=0)
    left = jobs(tmp_path / "outputs")
    for run_dir in left:
        assert_whole(run_dir, 3)
        assert (run_dir / ".submitted").read_text().isdigit()
    assert result(left[1])["overrides"] == [*SMALL, "optimizer=adamw", "model.dropout=0.2"]
    assert len(list((the_sweep(tmp_path) / "submitit").glob("*/*_result.pkl"))) == 2
    assert len(table(done)) == 2


@pytest.mark.slow
def test_a_search_to_its_best_trial(here: Path) -> None:
    """One of the values diverges: its trials are told so, and are no end."""
    words = ("model.target=my_nets.Net,my_nets.Diverges", "optimizer.lr=tag(log,interval(1e-3,1e-1))", "updates=5")
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=5", "hydra.sweeper.seed=1", "hydra.sweeper.sampler=random")
    done = train("-m", *OWN, *words, *optuna, cwd=here, code=0)
    left = jobs(here / "outputs")
    statuses = [result(d)["status"] for d in left]
    assert set(statuses) == {"completed", "diverged"}, "the seed draws both"
    assert len(statuses) == 5
    summary = told(the_sweep(here))
    best = max((j for j in summary["jobs"] if j["objective"] is not None), key=lambda j: j["objective"])
    assert summary["best"] == best["job"]
    assert f"best: job {best['job']}, validation accuracy" in done.out
    assert f"/{best['job']}/recipe.yaml" in done.out
    assert "Diverges" not in re.findall(r"^  drivetrain train (.*)$", done.out, re.M)[0]
    done = train("-m", f"resume={the_sweep(here)}", "hydra.sweeper.n_trials=6", cwd=here, code=0)
    assert [result(d)["status"] for d in jobs(here / "outputs")][:5] == statuses
    assert len(table(done)) == 6


# --- the longer ones ---


@pytest.mark.slow
def test_no_job_outlives_a_sweep_that_is_killed(here: Path) -> None:
    """SIGKILL to the sweep alone: its job saves and ends, and until then the folder is in use."""
    endless = [word.replace("epochs=2", "epochs=20000") for word in GATED]  # it ends by the signal alone, whenever that comes
    with at_the_gate(here, "5", *endless, "runtime.seed=0,1") as (process, go):
        process.kill()
        process.wait()
        sweep = the_sweep(here)
        refused = train("-m", f"resume={sweep}", cwd=here, env={"GATE": str(go.parent)})
        go.touch()
        until(lambda: (sweep / "0" / "result.json").exists())
    assert refused.code == 2, refused
    assert "is in use by another process" in refused.err
    assert result(sweep / "0")["status"] == "interrupted"


@pytest.mark.slow
def test_the_live_table_in_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = ("train", "-m", *TINY, "epochs=6", "runtime.seed=0,1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    env = environment({"COLUMNS": "140", "LINES": "40", "TERM": "xterm"})
    process = subprocess.Popen([sys.executable, "-m", "drivetrain", *words], cwd=tmp_path, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:  # the other side is closed
        pass
    assert process.wait() == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"[12] of 3 done · about [\d.]+ s left", text)
    assert re.search(r"│ running +│ \d+/48 ", text)
    assert re.search(r"│ waiting ", text)
    assert "best: job" in text
    assert "recipe default" not in text, "the jobs' own lines are in their folders"
    assert "recipe default" in (the_sweep(tmp_path) / "0" / "output.txt").read_text()


FAKE = {
    "sbatch": """#!/bin/bash
        echo "$@" >> "$SLURM_FAKE/submissions"
        last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
        for k in $(seq 0 "$last"); do
            SLURM_JOB_ID=77$k SLURM_ARRAY_JOB_ID=77 SLURM_ARRAY_TASK_ID=$k SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 \\
            SLURM_NODEID=0 SLURM_JOB_NUM_NODES=1 setsid bash "$1" > "$SLURM_FAKE/$k.txt" 2>&1 < /dev/null &
        done
        echo "Submitted batch job 77"
        """,
    "srun": """#!/bin/bash
        while [[ $1 == --* ]]; do
            case $1 in --output|--error) shift 2;; *) shift;; esac
        done
        exec "$@"
        """,
    "sacct": """#!/bin/bash
        echo "JobID|State|NodeList"; echo "77_0|RUNNING|here"; echo "77_1|RUNNING|here"
        """,
}  # a Slurm of one machine


@pytest.mark.slow
def test_slurm_jobs_run_on_when_the_sweep_is_stopped(tmp_path: Path) -> None:
    """Ctrl-C leaves them; resume=<dir> finds them again, and submits nothing twice."""
    cwd, programs = with_own_nets(tmp_path / "here"), empty(tmp_path / "bin")
    for name, text in FAKE.items():
        (programs / name).write_text(re.sub(r"^ {8}", "", text, flags=re.M))
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_FAKE": str(programs)}
    words = (
        "runtime.seed=0,1",
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.partition=gpu",
        "hydra.launcher.array_parallelism=2",
    )
    with at_the_gate(cwd, "5", *GATED, *words, ranks=2, env=env) as (process, go):
        process.send_signal(signal.SIGINT)
        done = finish(process)
    sweep = the_sweep(cwd)
    assert done.code == 75, done
    assert (
        f"2 jobs run on in Slurm: see them again by drivetrain train -m resume=outputs/{sweep.relative_to(cwd / 'outputs')}"
        in done.err
    )
    process = start("train", "-q", "-m", f"resume={sweep}", cwd=cwd, env={**env, "GATE": str(go.parent), "GATE_AT": "5"})
    until(lambda: directory.is_locked(sweep))
    go.touch()
    done = finish(process, code=0)
    for run_dir in jobs(cwd / "outputs"):
        assert_whole(run_dir, 16)
    (submission,) = (programs / "submissions").read_text().splitlines()
    script = Path(submission).read_text()
    assert "#SBATCH --partition=gpu" in script
    assert "#SBATCH --array=0-1%2" in script


def test_a_job_that_starts_after_the_signal_is_told_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The signal may come between the question whether there was one and the start."""
    monkeypatch.setattr(launchers, "run_job", lambda *_: time.sleep(600))
    launcher, ends = launchers.Forked(slots=2), list[int]()
    late: Any = SimpleNamespace(number=0, run_dir=empty(tmp_path / "job"), job=SimpleNamespace(job=None))
    late.close = lambda code, *_: ends.append(code)
    launcher.signal(signal.SIGTERM)
    launcher.start([late])
    assert launcher.wait(LIMIT_S) == [late]
    assert ends == [-signal.SIGTERM]
