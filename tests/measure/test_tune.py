"""`drivetrain tune`: what it takes is faster, what it leaves is not, and nothing of it reaches the run."""

import json
import math
from pathlib import Path

import pytest

from drivetrain import cli, recipe
from drivetrain.job import prepare
from drivetrain.measure import race, range_test, tries, tune
from drivetrain.measure.range_test import RangeTest
from drivetrain.measure.turns import Arm, Turn

OWN = [
    "data=own",
    "data.target=slow_set.Slow",
    "data.kwargs.pause=0.002",
    "trust=[slow_set]",
    "model=mlp",
    "batch.global_batch=8",
    "runtime.device=cpu",
]


def arm(*rates: float) -> Arm:
    done = Arm("", None, Path())
    done.turns = [Turn(1.0, 1, rate, 0.0, [], 0) for rate in rates]
    return done


# --- who races on ---


def test_who_was_beaten_twice_is_given_up():
    first, slower, faster = arm(100, 100), arm(90, 99), arm(110, 120)
    assert list(race.no_gain([first, slower, faster], 2)) == [slower]
    near = arm(109, 118)
    assert list(race.behind([first, slower, faster, near], 2)) == [slower]
    assert list(race.behind([first, arm(101, 101), faster], 2)) != []


def test_one_bad_round_ends_nobodys_race():
    first = arm(100, 100, 100)
    assert not list(race.no_gain([first, arm(50, 101, 101)], 3))
    assert not list(race.no_gain([arm(100), arm(50)], 1))


# --- what is tried ---


def test_words_over_words():
    words = ["loader=workers", "loader.num_workers=24", "epochs=3", "batch.global_batch=64", "surgery=[no_bias_before_norm]"]
    assert tries.over(words, ["loader=threads"]) == [words[2], words[3], words[4], "loader=threads"]
    assert tries.over(words, ["loader.num_workers=2"]) == [words[0], *words[2:], "loader.num_workers=2"]
    assert words[3] in tries.over(words, ["batch=accumulate", "batch.steps=2"])


def test_what_the_run_has_is_not_tried():
    job = prepare(["data=digits", "model=mlp", "loader=threads", "loader.num_threads=1", "batch.global_batch=12"])
    assert "loader=threads loader.num_threads=1" not in tries.loaders(job)
    assert "loader=threads loader.num_threads=2" in tries.loaders(job)
    assert tries.splits(job) == ["batch=accumulate batch.steps=2", "batch=accumulate batch.steps=4"]
    assert tries.splits(prepare(["data=digits", "batch=auto", "batch.memory_gb=4"])) == []
    assert tries.arithmetic(prepare(["data=digits", "precision=bf16"])) == ["surgery=[channels_last]"]


# --- the range test ---


def test_the_range_test_finds_where_the_loss_falls():
    rates = [10 ** (-6 + n / 20) for n in range(140)]
    losses = [2.3 - 2 / (1 + math.exp(-4 * (math.log10(r) + 2))) + (max(0.0, math.log10(r)) * 9) for r in rates]
    found = RangeTest(rates, losses, 0.1)
    assert found.steepest == pytest.approx(1e-2, rel=0.2)
    assert found.bound is not None
    assert 0.02 < found.bound < 0.2
    assert "advice" in " ".join(range_test.advice(found))


def test_a_loss_that_never_falls_gives_no_rate():
    found = RangeTest([1e-6, 1e-5, 1e-4, 1e-3], [2.3, 2.31, 2.29, 2.3], 0.1)
    assert found.steepest is None
    assert "fell at no rate" in range_test.advice(found)[0]


def test_lr_is_advice_and_leaves_a_plot(command):
    done, _ = command("tune", "data=digits", "model=mlp", "runtime.device=cpu", "what=lr", "lr_updates=60")
    assert done.returncode == 0, done.stderr
    folder = next(Path("outputs/tune").glob("*/*"))
    told = json.loads((folder / "tune.json").read_text())["range test"]
    assert told["rates"][0] == range_test.LOW
    assert 1e-4 < told["steepest"] < 5
    assert "range" in (folder / "tune.html").read_text()
    assert not (folder / "recipe.yaml").exists()
    assert not list(Path("outputs").rglob("result.json"))


# --- the search ---


def test_workers_are_found_for_data_that_sleeps(command, slow_set):
    done, _ = command("tune", *OWN, "what=workers", "rounds=6", "turn_s=0.1", "budget_s=200")
    assert done.returncode == 0, done.stderr
    folder = next(Path("outputs/tune").glob("*/*"))
    found = recipe.read(folder / "recipe.yaml")
    assert found.choices["loader"] in ("resident", "threads", "workers", "device"), done.stdout
    assert found.claim is not None
    assert found.claim.ratio > 1
    told = json.loads((folder / "tune.json").read_text())
    assert told["All that was taken, measured anew"]["rows"][1]["ratio"][1] > 1
    job = prepare([f"recipe={folder / 'recipe.yaml'}", *OWN[:4]])
    assert job.run.choices["loader"] == found.choices["loader"]


@pytest.mark.parametrize("word", ["what=everything", "budget_s=-1", "resume=auto", "precision=bf17"])
def test_bad_words_are_refused(word, capsys):
    assert cli.main(["tune", word]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_worse_result_is_taken_back():
    tuning = tune.Tuning(tune.Settings(), [], ())
    tuning.taken = {"how data is read": "loader=threads", "precision and memory layout": "precision=bf16"}
    tuning._take_back("loss worse")
    assert tuning.taken == {"how data is read": "loader=threads"}
    assert "taken back" in tuning.said[0]
