"""`drivetrain tune target=…`, on made-up arrivals: batches near the noise scale, ranked by the time to a target."""

import math

import pytest

from drivetrain.cli import main
from drivetrain.launch.job import prepare
from drivetrain.measure.benchmark.comparison import TimesToTarget, columns, proven, ranked
from drivetrain.measure.tune import by_target


def arm(label, *seconds):
    return TimesToTarget(label, list(seconds), [None if s is None else int(10 * s) for s in seconds])


def test_batches_near_the_noise_scale_are_tried_with_a_rate_that_follows():
    run = prepare(["data=digits", "model=mlp", "batch.global_batch=128"]).run
    found = by_target.candidates(run, 60.0, 1150)
    assert found == [
        f"batch.global_batch={n} batch.lr_scaling=sqrt batch.base_batch=128" for n in (32, 64)
    ]  # 128 is the run's own
    assert by_target.candidates(run, None, 1150) == []
    assert by_target.candidates(run, 1e6, 1150) == []
    two = prepare(["data=digits", "model=mlp", "batch=accumulate", "batch.accumulation_steps=3", "batch.global_batch=12"]).run
    assert [int(w.split()[0].rpartition("=")[2]) % 3 for w in by_target.candidates(two, 60.0, 1150)] == [0, 0, 0]


def test_what_does_not_arrive_is_last_and_stays():
    never, slow, soon, half = arm("n", None, None), arm("s", 9.0, 9.1), arm("f", 3.0, 3.1), arm("h", 1.0, None)
    assert [a.label for a in ranked([never, slow, half, soon])] == ["f", "s", "h", "n"]
    assert math.isinf(never.median)
    assert [cell for (cell,) in columns([never], slow, "it").values()] == ["0 of 2", "not reached", "–", "–"]


def test_only_what_is_sooner_beyond_doubt_is_kept():
    base = arm("as it is", 10.0, 10.5, 9.8, 10.1, 10.2, 9.9, 10.3, 10.0)
    better = arm("b", *[s / 2 for s in base.seconds])
    doubtful = arm("d", 9.0, 11.5, 9.8, 8.1, 12.2, 9.9, 10.3, 9.0)
    losing = arm("l", *[1.0] * 7, None)
    assert proven([base, doubtful, better]) is better
    assert proven([base, doubtful]) is None
    assert proven([base, losing]) is None
    assert proven([base]) is None


@pytest.mark.parametrize(("seconds", "trained"), [(1e6, 5), (-1.0, 3)])
def test_more_than_three_seeds_are_trained_only_while_there_is_time(seconds, trained):
    order = []

    def train(n, number):
        order.append(n)
        return (1.0 + n, 10)

    arms = [arm("a"), arm("b")]
    by_target.train_all(arms, train, 5, seconds)
    assert [len(a.seconds) for a in arms] == [trained, trained]
    assert order[:4] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["target=fast"], "give a metric and a value"),
        (["target=accuracy>=0.9", "what=lr"], "leave out what="),
        (["--target", "accuracy>=0.9", "what=lr"], "target=accuracy>=0.9 searches the batch"),
        (["--target=fast"], "give a metric and a value"),
        (["--target", "accuracy>=0.9", "target=accuracy>=0.8"], "target"),
        (["target=accuracy>=0.9", "batch=critical"], "set batch=fixed"),
    ],
)
def test_bad_words_are_refused(words, problem, capsys):
    assert main.main(["tune", *words]) == 2
    assert problem in capsys.readouterr().err
