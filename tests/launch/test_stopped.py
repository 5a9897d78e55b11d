"""A command that is told to stop before its run begins, or in a child's look at it: it says so, and leaves nothing."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.core.errors import INTERRUPTED
from drivetrain.launch import launcher
from tests.support import command
from tests.support.waiting import LIMIT_S, until

LOOK = ("batch=critical", "batch.look_updates=100000", "epochs=20000", "updates=null")


def gone(process: int) -> bool:
    """Wait for the end of a process."""
    return until(lambda: not Path(f"/proc/{process}").exists())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_before_a_run_is_answered_in_words(tiny, monkeypatch, capsys, number):
    monkeypatch.setattr(launcher, "_announce", lambda *_: signal.raise_signal(number))
    assert main.main(["train", *tiny()]) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
    assert not Path("outputs").exists()


def test_a_signal_in_the_look_of_batch_critical_ends_its_process(tiny, tmp_path, monkeypatch, capsys):
    gate = command.empty(tmp_path / "gate")
    command.with_own_nets(tmp_path / "nets")
    monkeypatch.chdir(tmp_path / "nets")
    monkeypatch.setenv("GATE", str(gate))
    monkeypatch.setenv("GATE_AT", "1")
    looking: list[int] = []

    def tell() -> None:
        arrived = until(lambda: list(gate.iterdir()))
        looking.append(int(arrived[0].name.rpartition("-")[2]))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    own = ("model=own", "model.target=my_nets.Gated", "trust=[my_nets]", "runtime.device=cpu")
    assert main.main(["train", *tiny(*LOOK, *own)]) == INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    assert looking
    assert gone(looking[0])
    assert not Path("outputs").exists()


@pytest.mark.slow
def test_a_run_of_recipe_verify_ends_with_its_starter(tiny, tmp_path, monkeypatch):
    """Its other runs are forked, and end as ranks do."""
    monkeypatch.chdir(command.with_own_nets(tmp_path / "nets"))
    gate = command.empty(tmp_path / "gate")
    own = ("model=own", "model.target=my_nets.Gated", "trust=[my_nets]", "runtime.device=cpu")
    words = tiny(*own, "epochs=20000", "updates=null")
    env = {**command.environment(), "GATE": str(gate), "GATE_AT": "1"}
    run = subprocess.Popen(
        [sys.executable, "-m", "drivetrain.cli.child", "train", "--quiet", *words], stdin=subprocess.PIPE, env=env
    )
    try:
        command.arrivals(gate, 1, run)
        assert run.stdin is not None
        run.stdin.close()
        assert run.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        run.kill()


PROGRAM = """
import signal, sys
import drivetrain

def note(number, frame):
    print("handler", flush=True)

if __name__ == "__main__":
    handler, words = sys.argv[1], sys.argv[2:]
    if handler == "own":
        signal.signal(signal.SIGTERM, note)
    for number in (1, 2):
        print("ended", drivetrain.train([*words, f"runtime.seed={number}"]).status, flush=True)
        words = [word for word in words if not word.startswith(("model", "parallel"))] + ["model=mlp", "updates=1"]
"""


def a_program_at_the_gate(tmp_path, handler, *words):
    """A program that trains twice, its first run at the gate; (process, the processes at the gate, the file that lets go)."""
    place = command.with_own_nets(tmp_path / "place")
    (place / "program.py").write_text(PROGRAM)
    gate = command.empty(tmp_path / "gate")
    own = ("model=own", "model.target=my_nets.Gated", "trust=[my_nets]", "runtime.device=cpu", "epochs=20000", "updates=null")
    process = command.start(handler, *words, *own, cwd=place, how=["program.py"], env={"GATE": str(gate), "GATE_AT": "2"})
    ranks = 2 if "parallel=ddp" in words else 1
    arrived = command.arrivals(gate, ranks, process)
    return process, [int(file.name.rpartition("-")[2]) for file in arrived], gate / "go"


DDP = ("parallel=ddp", "parallel.nproc=2")


@pytest.mark.parametrize(("handler", "strategy"), [("own", ()), ("none", DDP)], ids=["in this process", "in others"])
def test_a_signal_in_a_users_program_does_what_it_would_have_done_after_the_run(tiny, tmp_path, strategy, handler):
    process, ranks, go = a_program_at_the_gate(tmp_path, handler, *tiny(*strategy))
    process.send_signal(signal.SIGTERM)
    go.touch()
    done = command.finish(process)
    ends = sorted(command.result(run)["status"] for run in command.runs(tmp_path / "place"))
    assert ends == (["interrupted"] if handler == "none" else ["completed", "interrupted"]), done
    said = [line for line in done.out.splitlines() if line.startswith(("handler", "ended"))]
    if handler == "none":
        assert (done.code, said) == (-signal.SIGTERM, []), done
    else:
        assert (done.code, said) == (0, ["handler", "ended interrupted", "ended completed"]), done
    assert all(gone(rank) for rank in ranks)


def test_nothing_outlives_a_users_program_that_is_killed(tiny, tmp_path):
    process, ranks, go = a_program_at_the_gate(tmp_path, "none", *tiny(*DDP))
    process.kill()
    go.touch()
    process.communicate()
    assert all(gone(rank) for rank in ranks)


SWEEP = ("optimizer=sgd,adamw", *DDP)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_sweep_whose_jobs_have_ranks(tiny, tmp_path, number):
    """A job of a sweep is forked, and starts its ranks itself."""
    place, gate = command.with_own_nets(tmp_path / "place"), command.empty(tmp_path / "gate")
    own = ("model=own", "model.target=my_nets.Gated", "trust=[my_nets]", "runtime.device=cpu", "epochs=20000", "updates=null")
    words = [word for word in tiny(*own) if not word.startswith("optimizer=")]
    sweep = command.start("train", "-m", *words, *SWEEP, cwd=place, env={"GATE": str(gate), "GATE_AT": "2"})
    arrived = command.arrivals(gate, 2, sweep)
    sweep.send_signal(number)
    (gate / "go").touch()
    command.finish(sweep)
    assert all(gone(int(file.name.rpartition("-")[2])) for file in arrived)
    assert command.result(command.runs(place)[0])["status"] == "interrupted"
