"""What a run's figures say at its end, in words; nothing where they say nothing."""

import pytest

from drivetrain.run import remarks
from drivetrain.run.reader import Points
from drivetrain.run.remarks import Counted
from drivetrain.run.result import Result


def points(losses: list[float], every: int = 10, name: str = "loss") -> Points:
    updates = [every * (i + 1) for i in range(len(losses))]
    return Points(updates, updates, [float(u) for u in updates], [{name: loss} for loss in losses], "validation")


@pytest.mark.parametrize(
    ("trained", "evaluated", "says"),
    [
        ([2.0, 1.0, 0.5, 0.2], [1.5, 0.9, 1.0, 1.3], "overfitted since update 20: the validation loss rose from 0.9 to 1.3, and"),
        ([2.0, 1.0, 0.5, 0.2], [1.5, 0.9, 0.9, 0.92], None),  # no more than noise
        ([2.0, 1.0, 1.5, 1.6], [1.5, 0.9, 1.0, 1.3], None),  # both rise: that is no overfitting
        ([2.0, 1.0, 0.5, 0.2], [1.5, 1.0, 0.8, 0.5], "still improving: the validation loss fell from 0.8 to 0.5"),
        ([2.0, 1.0, 0.5, 0.2], [1.5, 0.6, 0.51, 0.5], None),
        ([2.0, 1.0, 0.5], [1.5, 1.0, 0.5], None),  # too few to tell
        ([2.3, 2.3, 2.3, 2.3], [2.3, 2.31, 2.3, 2.29], "hardly learnt: the validation loss is 2.29 at the end"),
        ([2.3], [2.3], "hardly learnt"),
        ([2.3, -1.0], [2.3, -4.0], None),  # a loss that may be negative has no shares
        ([], [], None),
    ],
)
def test_curves(trained, evaluated, says):
    said = list(remarks.of_curves(points(trained), points(evaluated)))
    assert [line.startswith(says) for line in said] == [True] * (says is not None), said
    named = list(remarks.of_curves(points(trained), points(evaluated, name="noisy/loss"), "noisy/loss"))
    assert named == said


@pytest.mark.parametrize(
    ("accuracy", "counted", "says"),
    [
        (
            0.9,
            Counted(11, 0.5),
            "few samples: the accuracy of 0.9 on the 11 samples of the test set may be anything from 0.61",
        ),
        (0.6, Counted(11, 0.5), "at chance: the accuracy of 0.6 on the 11 samples of the test set is not surely above"),
        (0.9, Counted(10_000, 0.95), "at chance"),  # the commonest class alone is better
        (0.9, Counted(10_000, 0.5), None),
        (0.9, Counted(10_000), None),
        (0.9, Counted(20), "few samples"),
        (None, Counted(3, 0.5), None),
    ],
)
def test_accuracies(accuracy, counted, says):
    final = {} if accuracy is None else {"accuracy": accuracy}
    said = list(remarks.of_test(Result(metrics={"test": {"final": final}}), {"": counted}))
    assert [line.startswith(says) for line in said] == [True] * (says is not None), said


def test_named_sets():
    result = Result(metrics={"test": {"final": {"clean/accuracy": 0.9, "noisy/accuracy": 0.5}}})
    (said,) = remarks.of_test(result, {"clean": Counted(10_000, 0.5), "noisy": Counted(10_000, 0.5)})
    assert "of the test set noisy" in said


def test_an_interval_covers_19_of_20():
    """Of every number of successes of 40 trials, those whose interval holds the true share have 95 % of its chance, or nearly."""
    from math import comb

    for share in (0.1, 0.37, 0.8):
        held = [k for k in range(41) if (i := remarks.interval(k / 40, 40)) and i[0] <= share <= i[1]]
        assert 0.92 < sum(comb(40, k) * share**k * (1 - share) ** (40 - k) for k in held) < 0.98


def test_a_run_ends_with_them(train):
    result = train("updates=2", "optimizer=sgd", "optimizer.lr=1e-9")
    assert result.remarks[0].startswith("hardly learnt: the test loss is ")
    assert Result.read(result.run_dir).remarks == result.remarks
    assert all(line in (result.run_dir / "report.html").read_text() for line in result.remarks)
