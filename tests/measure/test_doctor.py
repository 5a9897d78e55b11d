"""`drivetrain doctor`: the planted bottleneck is the one that it names, with its line, and what it prescribes is proven."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.recipe import read

PLANTED = """
import time
import torch
from drivetrain.loss import CrossEntropy

class Data(torch.utils.data.Dataset):
    classes = ("a", "b")

    def __init__(self, split, pause=0.0):
        self.pause, self.noise = pause, torch.rand(256, 64)

    def __len__(self):
        return 256

    def __getitem__(self, index):
        if self.pause:
            time.sleep(self.pause)  # slow-data
        return self.noise[index], index % 2

class Net(torch.nn.Module):
    def __init__(self, shape, classes, read=False, loop=False, width=512):
        super().__init__()
        self.read, self.loop = read, loop
        self.body = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
            torch.nn.Linear(width, classes),
        )

    def forward(self, x):
        if self.read:
            self.seen = x.mean().item()  # read-back
        if self.loop:
            x = x.clone()
            for row in range(x.shape[0]):
                x[row, 0] = x[row, 1] * 2  # element-loop
        return self.body(x)

class Shuffled(CrossEntropy):
    def __call__(self, output, target):
        order = torch.randperm(1_000_000)  # made-in-step
        return super().__call__(output, target) + 0 * order[0]
"""
OWN = ["data=own", "data.target=planted.Data", "model=own", "model.target=planted.Net", "trust=[planted]", "saving=none"]
CASES = {
    "slow data": (["data.kwargs.pause=0.001"], "waits for data", "slow-data"),
    "a read": (["model.kwargs.read=true"], "reads a value back", "read-back"),
    "a loop": (["model.kwargs.loop=true"], "loop over elements", "element-loop"),
    "a tensor": (["loss=shuffled"], "tensors are made", "made-in-step"),
    "workers": (["loader=workers", "loader.num_workers=24"], "24 loader workers share", None),
    "tiny batch": (["batch.global_batch=2"], "batch is too small", None),
    "saving": (["saving=last", "saving.every_updates=1", "model.kwargs.width=1024"], "saving takes", None),
    "nothing": (["model.kwargs.width=2048"], "nothing is in its way", None),
}


@pytest.fixture
def doctor(tmp_path):
    """The doctor in a process of its own, with the planted module beside it; what it said."""
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "mine/loss").mkdir(parents=True)
    (tmp_path / "mine/loss/shuffled.yaml").write_text("_target_: planted.Shuffled\n")

    def run(*words: str) -> str:
        given = [
            "evaluate_every=1000",
            "epochs=1000",
            "batch.global_batch=128",
            "log_every=100",
            "runtime.device=cpu",
            *OWN,
            *words,
        ]
        last = {w.partition("=")[0]: w for w in given}
        command = [sys.executable, "-m", "drivetrain", "doctor", "-cd", "mine", *last.values()]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def line_of(mark: str) -> int:
    return next(n for n, line in enumerate(PLANTED.splitlines(), 1) if mark in line)


# The short form: costs that no busy machine hides. Which finding weighs the most is for a quiet one to say.
SHORT = ("slow data", "workers", "saving")


@pytest.mark.parametrize("case", SHORT)
def test_what_was_planted_is_found(doctor, case):
    words, verdict, mark = CASES[case]
    said = doctor(*words, "prove=false", "look_s=0.4")
    assert verdict in said.split("verdict: ")[1], said
    if mark is not None:
        assert f"planted.py:{line_of(mark)} " in said, said


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_was_planted_is_the_verdict(doctor, case):
    words, verdict, mark = CASES[case]
    said = doctor(*words, "prove=false", "look_s=0.4")
    first = said.split("verdict: ")[1]
    assert verdict in first.splitlines()[0], said
    if mark is not None:
        assert f"planted.py:{line_of(mark)} " in first.splitlines()[1], said


@pytest.mark.slow
def test_what_it_prescribes_is_faster_and_runs(doctor):
    said = doctor("data.kwargs.pause=0.002", "batch.global_batch=16", "look_s=0.3", "rounds=6", "turn_s=0.2")
    gain = re.search(r"\n([\d.]+) × the samples a second \(([\d.]+) to", said)
    assert gain, said
    assert float(gain[2]) > 1
    recipe = next(Path("outputs/doctor").rglob("recipe.yaml"))
    assert str(recipe.parent) in said
    assert "measured in turns" in recipe.read_text()
    claim = read(recipe).claim
    assert (claim.ratio, claim.interval[0]) == pytest.approx((float(gain[1]), float(gain[2])), abs=0.006)
    assert re.search(rf"drivetrain recipe verify -cd mine {recipe} .*data=own data\.target=planted\.Data", said)
    assert set(claim.against) <= {"loader", "loader.num_workers", "loader.prefetch_factor"}
    words = ["epochs=1", "updates=2", *OWN]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.getcwd()])}
    subprocess.run([sys.executable, "-m", "drivetrain", "train", f"recipe={recipe}", *words], env=env, check=True)


def test_a_run_that_cannot_be_is_an_error(tmp_path, capsys):
    from drivetrain import cli

    assert cli.main(["doctor", "precision=bf17"]) == 2
    assert "did you mean" in capsys.readouterr().err
