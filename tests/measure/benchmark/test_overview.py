"""The answer of a comparison in one sentence, and its table."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from drivetrain.measure.benchmark.comparison import Comparison, Row
from drivetrain.measure.benchmark.noninferiority import FIRST, Verdict, in_words
from drivetrain.measure.benchmark.overview import headline, names, overview
from drivetrain.measure.intervals import Interval

BASE = Row("naive", [], None, ratio=Interval(1.0, 1.0, 1.0))
FAST = Row("fast <b>", [], None, ratio=Interval(1.41, 1.3, 1.5))
UNSURE = Row("unsure", [], None, ratio=Interval(1.6, 0.9, 2.0))
FEW = Row("few", [], None, ratio=Interval(1.8, 0.0, math.inf))  # as too few rounds give it
FAILED = Row("failed", [], "out of memory")


def comparison(*rows, quality=False):
    return Comparison(list(rows), [], [], SimpleNamespace(quality=quality), {}, 1.0)


def judged(row, outcome, metric="accuracy", **more):
    return Row(row.label, [], None, ratio=row.ratio, verdict=Verdict(outcome, "accuracy 0.9 ± 0.01, loss 2", metric, **more))


def test_the_fastest_arm_that_is_certain_is_the_answer():
    assert headline(comparison(BASE, FAST, UNSURE, FEW, FAILED)) == "fast <b> is 1.41 × as fast as naive (1.30 to 1.50)."
    assert headline(comparison(BASE, UNSURE, FEW, FAILED)) == "No arm is certainly faster than naive."
    step = replace(FAST, label="+ precision=bf16")
    ladder = replace(comparison(BASE, step), subject="naive with all up to {}")
    assert headline(ladder) == "naive with all up to precision=bf16 is 1.41 × as fast as naive (1.30 to 1.50)."


def test_where_quality_was_asked_for_only_a_pass_is_an_answer():
    base = judged(BASE, FIRST)
    for outcome in ("FAIL", "INCONCLUSIVE"):
        answer = headline(comparison(base, judged(FAST, outcome), quality=True))
        assert answer == "No arm is certainly faster than naive with a result known to be as good."
    answer = headline(comparison(base, judged(FAST, "PASS"), quality=True))
    assert answer == "fast <b> is 1.41 × as fast as naive (1.30 to 1.50), and its result is no worse."


def test_the_table_draws_intervals_and_says_what_differs():
    worse = judged(FAST, "FAIL", degradation={"accuracy": Interval(0.02, 0.01, 0.03)})
    better = judged(UNSURE, "PASS", degradation={"accuracy": Interval(-0.02, -0.03, -0.01)})
    same = judged(FEW, "PASS", degradation={"accuracy": Interval(0.0, 0.0, 0.0)})
    text = overview(comparison(judged(BASE, FIRST), worse, better, same, FAILED, quality=True))
    for expected in (
        "fast &lt;b&gt;", 'class="faster"', 'class="FAIL"', ">worse by 0.02 (0.01 to 0.03)", ">the same</td>",
        "accuracy of the validation set",
        ">better by 0.02 (0.01 to 0.03)", ">0.9 ± 0.01", "out of memory", "95 % interval 1.300 to 1.500",
    ):  # fmt: skip
        assert expected in text
    assert "<b>" not in text
    assert text.count("<tr>") == 6
    assert not re.search(r'="[^"]*(inf|nan)', text)  # an arm without an interval does not spoil the others' scale


def test_the_winner_is_marked_and_columns_come_in_one_order():
    text = overview(comparison(judged(BASE, FIRST), judged(FAST, "PASS"), judged(UNSURE, "PASS"), quality=True))
    assert re.findall(r"<tr class=winner>.*?</code>", text) == ['<tr class=winner><th scope="row"><code>fast &lt;b&gt;</code>']
    heads = re.findall(r'<button type="button">(.*?)</button>', text)
    assert heads[:3] == ["arm", "accuracy of the validation set", "speed"]


@pytest.mark.parametrize(
    ("labels", "called"),
    [
        (["precision=fp32 surgery=[]", "precision=bf16 surgery=[]"], ["precision=fp32", "precision=bf16"]),
        (["a=1 b=1", "a=1 b=2", "a=2 b=2"], ["a=1 b=1", "b=2", "a=2 b=2"]),
        (["lr=1", "lr=1"], ["lr=1", "lr=1"]),
        (["naive", "+ precision=bf16", "+ compile=step"], ["naive", "+ precision=bf16", "+ compile=step"]),
    ],
)
def test_arms_are_named_by_what_differs(labels, called):
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
