"""The answer of a comparison in one sentence, and its table."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from drivetrain.measure.benchmark.compare import headline, names, sections, table
from drivetrain.measure.benchmark.comparison import Comparison, Row
from drivetrain.measure.benchmark.quality import FIRST, Verdict, in_words
from drivetrain.measure.benchmark.training import TrainedRun
from drivetrain.measure.intervals import Interval
from drivetrain.ui.sheet import joined

BASE = Row("naive", [], None, ratio=Interval(1.0, 1.0, 1.0))
FAST = Row("fast <b>", [], None, ratio=Interval(1.41, 1.3, 1.5))
UNSURE = Row("unsure", [], None, ratio=Interval(1.6, 0.9, 2.0))
FEW = Row("few", [], None, ratio=Interval(1.8, 0.0, math.inf))  # as too few rounds give it
FAILED = Row("failed", [], "out of memory")


def comparison(*rows, quality=False):
    return Comparison(list(rows), [], [], SimpleNamespace(quality=quality, block_s=0.4), {}, 1.0)


def judged(row, outcome, metric="accuracy", **more):
    return Row(row.label, [], None, ratio=row.ratio, verdict=Verdict(outcome, "accuracy 0.9 ± 0.01, loss 2", metric, **more))


def test_the_fastest_variant_that_is_certain_is_the_answer():
    assert headline(comparison(BASE, FAST, UNSURE, FEW, FAILED)) == "fast <b> is 1.41 × as fast as naive (1.30 to 1.50)."
    few = replace(FEW, whole_run=Interval(1.7, 0.0, math.inf))  # the answer has the figure of the table's column "speed"
    nearest = "few was 1.80 × as fast, and 0 rounds are too few to tell (6 give an interval)"
    assert headline(comparison(BASE, few, FAILED)) == f"No variant is measurably faster than naive: {nearest}."
    nearest = "few is 1.80 × as fast, whose 0 rounds are too few to tell"
    assert headline(comparison(BASE, UNSURE, FEW, FAILED)) == f"No variant is measurably faster than naive: {nearest}."
    nearest = "unsure is 1.60 × as fast (0.90 to 2.00), which may be chance"
    assert headline(comparison(BASE, UNSURE, FAILED)) == f"No variant is measurably faster than naive: {nearest}."
    slower = replace(UNSURE, ratio=Interval(0.9, 0.8, 1.1))
    assert headline(comparison(BASE, slower)) == "No variant is measurably faster than naive."
    step = replace(FAST, label="+ precision=bf16")
    ladder = replace(comparison(BASE, step), subject="naive with all up to {}")
    assert headline(ladder) == "naive with all up to precision=bf16 is 1.41 × as fast as naive (1.30 to 1.50)."


def test_where_quality_was_asked_for_only_a_pass_is_an_answer():
    base = judged(BASE, FIRST)
    for outcome in ("FAIL", "INCONCLUSIVE"):
        answer = headline(comparison(base, judged(FAST, outcome), quality=True))
        known = "No variant is measurably faster than naive with a result known to be as good"
        assert answer == f"{known}: fast <b> is 1.41 × as fast (1.30 to 1.50), and its result is {outcome}."
    answer = headline(comparison(base, judged(FAST, "PASS"), quality=True))
    assert answer == "fast <b> is 1.41 × as fast as naive (1.30 to 1.50), and its result is no worse."


def test_a_result_that_is_certainly_better_is_in_the_answer():
    slow, base = Row("slow", [], None, ratio=Interval(0.8, 0.7, 0.9)), judged(BASE, FIRST)
    by, more = {"accuracy": Interval(-0.02, -0.03, -0.01)}, {"accuracy": Interval(-0.04, -0.05, -0.03)}
    unclear = judged(UNSURE, "PASS", degradation={"accuracy": Interval(-0.2, -0.5, 0.1)})
    better = judged(slow, "INCONCLUSIVE", degradation=by)
    assert headline(comparison(base, better, unclear, quality=True)) == (
        "slow has a better accuracy than naive, by 0.02 (0.01 to 0.03), but no variant is measurably faster with a result known "
        "to be as good: unsure is 1.60 × as fast (0.90 to 2.00), which may be chance."
    )
    fast = "fast <b> is 1.41 × as fast as naive (1.30 to 1.50)"
    answer = headline(comparison(base, better, judged(FAST, "PASS"), quality=True))
    assert answer == f"{fast}, and its result is no worse; slow has a better accuracy than naive, by 0.02 (0.01 to 0.03)."
    answer = headline(comparison(base, better, judged(FAST, "PASS", degradation=more), quality=True))
    assert answer == f"{fast}, and has a better accuracy than naive, by 0.04 (0.03 to 0.05)."
    failed = judged(slow, "FAIL", degradation=by)  # of the same mathematics another loss
    assert headline(comparison(base, failed, quality=True)).startswith("No variant is measurably faster")


def arriving(row, *seconds):
    """A variant whose seeds reached the target after so many seconds; None: not."""
    name = "seconds to accuracy>=0.9"
    runs = [TrainedRun(n, 1, {name: 99.0 if s is None else s}, [name] * (s is None)) for n, s in enumerate(seconds)]
    return replace(row, verdict=Verdict("INCONCLUSIVE", "accuracy 0.9", "accuracy", runs))


def to_target(*rows):
    return replace(comparison(*rows, quality=True), target="accuracy>=0.9")


def test_with_a_target_variants_are_ranked_by_the_time_to_it():
    base = arriving(BASE, *[10.0, 10.5, 9.8, 10.1, 10.2, 9.9, 10.3, 10.0])
    soon, never = arriving(UNSURE, *[5.0, 5.2, 4.9, 5.1, 5.05, 4.95, 5.15, 5.0]), arriving(FAST, *[None] * 8)
    found = to_target(base, never, soon, FAILED)
    assert found.order() == [2, 0, 1, 3]
    assert headline(found).startswith(
        "unsure reaches accuracy>=0.9 sooner than naive, 2.00 × as fast (1.99 to 2.01): 5.0 s (median)"
    )
    assert "by 8 of 8 seeds. No variant is measurably faster" in headline(found)
    shown = table(found)
    assert [*shown.header][:5] == ["variant", "reached", "time to accuracy>=0.9", "updates to it", "sooner"]
    assert [row[:3] for row in shown.texts()] == [
        ["unsure", "8 of 8", "5.0 s"],
        ["naive", "8 of 8", "10.1 s"],
        ["fast <b>", "0 of 8", "not reached"],
        ["failed", "0 of 0", "not reached"],
    ]
    assert shown.winner == 0


def test_what_is_not_certainly_sooner_is_no_winner():
    base, none = arriving(BASE, 10.0, 11.0, 9.0), arriving(FAST, None, None, None)
    assert headline(to_target(none, none)).startswith("No variant reaches accuracy>=0.9.")
    answer = headline(to_target(base, none))
    assert answer.startswith(
        "No variant reaches accuracy>=0.9 certainly sooner than naive; the first in the order is naive: 10.0 s (median)"
    )
    answer = headline(to_target(replace(none, label="naive"), replace(base, label="late")))
    assert "; the first in the order is late: 10.0 s (median), by 3 of 3 seeds." in answer
    answer = headline(to_target(none, arriving(UNSURE, 4.0, None, None)))
    assert "; the first in the order is unsure: 1 of 3 seeds." in answer


def test_the_table_draws_intervals_and_says_what_differs():
    worse = judged(FAST, "FAIL", degradation={"accuracy": Interval(0.02, 0.01, 0.03)})
    better = judged(UNSURE, "PASS", degradation={"accuracy": Interval(-0.02, -0.03, -0.01)})
    same = judged(FEW, "PASS", degradation={"accuracy": Interval(0.0, 0.0, 0.0)})
    text = joined(sections(comparison(judged(BASE, FIRST), worse, better, same, FAILED, quality=True)))
    for expected in (
        "fast &lt;b&gt;", 'class="faster"', 'class="FAIL"', ">worse by 0.02 (0.01 to 0.03)", ">the same</td>",
        "accuracy of the validation set",
        ">better by 0.02 (0.01 to 0.03)", ">0.9 ± 0.01", "out of memory", "95 % interval 1.300 to 1.500",
    ):  # fmt: skip
        assert expected in text
    assert "<b>" not in text
    assert text.count("<tr>") == 12  # the variants, and all of their figures
    assert not re.search(r'="[^"]*(inf|nan)', text)  # a variant without an interval does not spoil the others' scale


def test_the_winner_is_marked_and_columns_come_in_one_order():
    text = table(comparison(judged(BASE, FIRST), judged(FAST, "PASS"), judged(UNSURE, "PASS"), quality=True)).html
    assert re.findall(r"<tr class=winner>.*?</th>", text) == ['<tr class=winner><th scope="row">fast &lt;b&gt;</th>']
    heads = re.findall(r'<button type="button">(.*?)</button>', text)
    assert heads[:3] == ["variant", "accuracy of the validation set", "speed"]


@pytest.mark.parametrize(
    ("labels", "called"),
    [
        (["precision=fp32 surgery=[]", "precision=bf16 surgery=[]"], ["precision=fp32", "precision=bf16"]),
        (["a=1 b=1", "a=1 b=2", "a=2 b=2"], ["a=1 b=1", "b=2", "a=2 b=2"]),
        (["lr=1", "lr=1"], ["lr=1", "lr=1"]),
        (["naive", "+ precision=bf16", "+ compile=step"], ["naive", "+ precision=bf16", "+ compile=step"]),
    ],
)
def test_variants_are_named_by_what_differs(labels, called):
    assert names(comparison(*(replace(BASE, label=label) for label in labels))) == called


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((0.0, 0.0, 0.0), "the same"),
        ((-1.1e-17, -0.0057, 0.0057), "the same on average (-0.0057 to 0.0057)"),
        ((0.014, -0.0037, 0.032), "worse by 0.014 (-0.0037 to 0.032)"),
        ((-0.02, -0.03, -0.01), "better by 0.02 (0.01 to 0.03)"),
    ],
)
def test_a_difference_in_words(found, words):
    assert in_words(*found) == words
