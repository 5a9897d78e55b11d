"""A sweep that ends early and goes on, runs several jobs at a time, hands them to submitit, or searches."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.run import directory
from drivetrain.sweeps import forked
from tests.support.command import (
    TINY,
    arrivals,
    checkpoints,
    empty,
    environment,
    finish,
    kill_all,
    losses,
    result,
    start,
    train,
    with_own_nets,
)
from tests.support.waiting import LIMIT_S, until
from tests.sweeps.test_command import OWN, SMALL, assert_whole, jobs, table

GATED = ("-q", "-m", *OWN, "model.target=my_nets.Gated", "epochs=2", "saving.keep=9")


def the_sweep(root: Path) -> Path:
    (sweep,) = root.glob("outputs/multirun/*/*")
    return sweep


def told(sweep: Path) -> dict[str, Any]:
    """Its sweep.json."""
    return json.loads((sweep / "sweep.json").read_text())


def gate_of(place: Path) -> Path:
    return empty(place.with_name(f"{place.name}-gate"))


def began(cwd: Path, gate: Path, at: int, *words: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    return start("train", *words, cwd=cwd, env={"GATE": str(gate), "GATE_AT": str(at), **(env or {})})


@pytest.mark.slow
def test_a_killed_sweep_goes_on_with_what_is_left(tmp_path: Path) -> None:
    """SIGKILL to all of it in the second of three jobs: the first is kept, the second resumes, the third begins."""
    cwd = with_own_nets(tmp_path / "here")
    gate = gate_of(cwd)
    words = ("optimizer=sgd,adamw", "model.target=my_nets.Net,my_nets.Gated")  # the gate is in jobs 1 and 3
    process = began(cwd, gate, 14, *GATED, *words)
    try:
        arrivals(gate, 1, process)
    finally:
        kill_all(process)
        process.communicate()
    sweep = the_sweep(cwd)
    assert sorted(p.name for p in sweep.iterdir() if p.is_dir()) == ["0", "1"]
    assert not (sweep / "1" / "result.json").exists()
    before = (sweep / "0" / "result.json").stat().st_mtime_ns
    (gate / "go").touch()
    done = train("-m", f"resume={sweep}", cwd=cwd, env={"GATE": str(gate)})
    assert done.code == 0, done
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
def test_several_at_a_time_and_the_signal_that_stops_them(tmp_path: Path) -> None:
    """Both jobs are at the gate at once; SIGTERM saves both; resume=auto goes on; the third has never begun."""
    cwd = with_own_nets(tmp_path / "here")
    gate = gate_of(cwd)
    joblib = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    process = began(cwd, gate, 5, *GATED, "runtime.seed=0,1,2", *joblib)
    try:
        arrivals(gate, 2, process)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        (gate / "go").touch()
        done = finish(process)
    finally:
        kill_all(process)
    sweep = the_sweep(cwd)
    assert done.code == 75, done
    assert [(result(sweep / n)["status"], result(sweep / n)["updates"]) for n in "01"] == [("interrupted", 5)] * 2
    assert not (sweep / "2").exists()
    assert f"resume by drivetrain train -m resume=outputs/{sweep.relative_to(cwd / 'outputs')}" in done.err
    assert told(sweep)["finished"] is False
    words = ("runtime.seed=0,1,2", "resume=auto", "hydra/launcher=joblib", "hydra.launcher.n_jobs=3")
    done = train(*GATED[1:], *words, cwd=cwd, env={"GATE": str(gate)})
    assert done.code == 0, done
    assert the_sweep(cwd) == sweep
    for run_dir in jobs(cwd / "outputs"):
        assert_whole(run_dir, 16)
    assert "5" in [c.name for c in checkpoints(sweep / "0")]
    assert "resuming from" in (sweep / "0" / "output.txt").read_text()


@pytest.mark.slow
def test_submitit_on_this_machine(tmp_path: Path) -> None:
    """Two jobs in processes of submitit's, with the files that any job leaves."""
    words = ("hydra/launcher=submitit_local", "hydra.launcher.array_parallelism=2", "hydra.launcher.timeout_min=5")
    done = train("-m", *SMALL, "optimizer=sgd,adamw", "model.dropout=0.2", *words, cwd=tmp_path)
    assert done.code == 0, done
    left = jobs(tmp_path / "outputs")
    for run_dir in left:
        assert_whole(run_dir, 3)
        assert (run_dir / ".submitted").read_text().isdigit()
    assert result(left[1])["overrides"] == [*SMALL, "optimizer=adamw", "model.dropout=0.2"]
    assert len(list((the_sweep(tmp_path) / "submitit").glob("*/*_result.pkl"))) == 2
    assert len(table(done)) == 2


@pytest.mark.slow
def test_a_search_to_its_best_trial(tmp_path: Path) -> None:
    """One of the values diverges: its trials are told so, and are no end."""
    cwd = with_own_nets(tmp_path / "here")
    words = ("model.target=my_nets.Net,my_nets.Diverges", "optimizer.lr=tag(log,interval(1e-3,1e-1))", "updates=5")
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=5", "hydra.sweeper.seed=1", "hydra.sweeper.sampler=random")
    done = train("-m", *OWN, *words, *optuna, cwd=cwd)
    assert done.code == 0, done
    left = jobs(cwd / "outputs")
    statuses = [result(d)["status"] for d in left]
    assert set(statuses) == {"completed", "diverged"}, "the seed draws both"
    assert len(statuses) == 5
    summary = told(the_sweep(cwd))
    best = max((j for j in summary["jobs"] if j["objective"] is not None), key=lambda j: j["objective"])
    assert summary["best"] == best["job"]
    assert f"best: job {best['job']}, validation accuracy" in done.out
    assert f"/{best['job']}/recipe.yaml" in done.out
    assert "Diverges" not in re.findall(r"^  drivetrain train (.*)$", done.out, re.M)[0]
    done = train("-m", f"resume={the_sweep(cwd)}", "hydra.sweeper.n_trials=6", cwd=cwd)
    assert done.code == 0, done
    assert [result(d)["status"] for d in jobs(cwd / "outputs")][:5] == statuses
    assert len(table(done)) == 6


# --- the longer ones ---


@pytest.mark.slow
def test_no_job_outlives_a_sweep_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL to the sweep alone: its job saves and ends, and until then the folder is in use."""
    cwd = with_own_nets(tmp_path / "here")
    gate = gate_of(cwd)
    endless = [word.replace("epochs=2", "epochs=20000") for word in GATED]  # it ends by the signal alone, whenever that comes
    process = began(cwd, gate, 5, *endless, "runtime.seed=0,1")
    try:
        arrivals(gate, 1, process)
        process.kill()
        process.wait()
        sweep = the_sweep(cwd)
        refused = train("-m", f"resume={sweep}", cwd=cwd, env={"GATE": str(gate)})
        (gate / "go").touch()
        until(lambda: (sweep / "0" / "result.json").exists())
    finally:
        kill_all(process)
        process.communicate()
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
    gate = gate_of(cwd)
    for name, text in FAKE.items():
        (programs / name).write_text(re.sub(r"^ {8}", "", text, flags=re.M))
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_FAKE": str(programs), "GATE": str(gate)}
    words = (
        "runtime.seed=0,1",
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.partition=gpu",
        "hydra.launcher.array_parallelism=2",
    )
    process = began(cwd, gate, 5, *GATED, *words, env=env)
    try:
        arrivals(gate, 2, process)
        process.send_signal(signal.SIGINT)
        done = finish(process)
    finally:
        kill_all(process)
    sweep = the_sweep(cwd)
    assert done.code == 75, done
    assert (
        f"2 jobs run on in Slurm: see them again by drivetrain train -m resume=outputs/{sweep.relative_to(cwd / 'outputs')}"
        in done.err
    )
    process = began(cwd, gate, 5, "-q", "-m", f"resume={sweep}", env=env)
    until(lambda: directory.is_locked(sweep))
    (gate / "go").touch()
    done = finish(process)
    assert done.code == 0, done
    for run_dir in jobs(cwd / "outputs"):
        assert_whole(run_dir, 16)
    (submission,) = (programs / "submissions").read_text().splitlines()
    script = Path(submission).read_text()
    assert "#SBATCH --partition=gpu" in script
    assert "#SBATCH --array=0-1%2" in script


def test_a_job_that_starts_after_the_signal_is_told_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The signal may come between the question whether there was one and the start."""
    monkeypatch.setattr(forked, "run_job", lambda *_: time.sleep(600))
    launcher, ends = forked.Forked(slots=2), list[int]()
    late: Any = SimpleNamespace(number=0, run_dir=empty(tmp_path / "job"), job=SimpleNamespace(job=None))
    late.close = lambda code, *_: ends.append(code)
    launcher.signal(signal.SIGTERM)
    launcher.start([late])
    assert launcher.wait(LIMIT_S) == [late]
    assert ends == [-signal.SIGTERM]
