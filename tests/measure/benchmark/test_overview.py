"""The answer of a comparison in one sentence, and its table."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from drivetrain.measure.benchmark.compare import Comparison, Row, headline, names, sections, table
from drivetrain.measure.benchmark.quality import FIRST, Verdict, in_words
from drivetrain.measure.benchmark.variants import TrainedRun
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


def arriving(row, *seconds):
    """A variant whose seeds reached the target after so many seconds; None: not."""
    name = "seconds to accuracy>=0.9"
    runs = [TrainedRun(n, 1, {name: 99.0 if s is None else s}, [name] * (s is None)) for n, s in enumerate(seconds)]
    return replace(row, verdict=Verdict("INCONCLUSIVE", "accuracy 0.9", "accuracy", runs))


def better_by(*interval):
    return {"degradation": {"accuracy": Interval(*interval)}}


SLOWER = replace(UNSURE, ratio=Interval(0.9, 0.8, 1.1))
SLOW, FIRST_ROW = Row("slow", [], None, ratio=Interval(0.8, 0.7, 0.9)), judged(BASE, FIRST)
BETTER = judged(SLOW, "INCONCLUSIVE", **better_by(-0.02, -0.03, -0.01))
NOT_CERTAIN = "No variant is measurably faster than naive"
KNOWN = "with a result known to be as good"
IS_FAST = "fast <b> is 1.41 × as fast as naive (1.30 to 1.50)"


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        # The fastest variant that is certain is the answer.
        ([BASE, FAST, UNSURE, FEW, FAILED], f"{IS_FAST}."),
        (  # the answer has the figure of the table's column "speed"
            [BASE, replace(FEW, whole_run=Interval(1.7, 0.0, math.inf)), FAILED],
            f"{NOT_CERTAIN}: few is 1.80 × as fast, and 0 rounds are too few to tell (6 give an interval).",
        ),
        (
            [BASE, UNSURE, FEW, FAILED],
            f"{NOT_CERTAIN}: few is 1.80 × as fast, and 0 rounds are too few to tell (6 give an interval).",
        ),
        (
            [BASE, replace(FEW, ratio=Interval(0.8, 0.0, math.inf), rates=[1.0])],
            f"{NOT_CERTAIN}: few is 0.80 × as fast, and 1 round is too few to tell (6 give an interval).",
        ),
        ([BASE, UNSURE, FAILED], f"{NOT_CERTAIN}: unsure is 1.60 × as fast (0.90 to 2.00), which may be chance."),
        ([BASE, SLOWER], f"{NOT_CERTAIN}."),
        # Where quality was asked for, only a PASS is an answer.
        *(
            (
                [FIRST_ROW, judged(FAST, outcome)],
                f"{NOT_CERTAIN} {KNOWN}: fast <b> is 1.41 × as fast (1.30 to 1.50), and its result is {outcome}.",
            )
            for outcome in ("FAIL", "INCONCLUSIVE")
        ),
        ([FIRST_ROW, judged(FAST, "PASS")], f"{IS_FAST}, and its result is no worse."),
        # A result that is certainly better is in the answer.
        (
            [FIRST_ROW, BETTER, judged(UNSURE, "PASS", **better_by(-0.2, -0.5, 0.1))],
            "slow has a better accuracy than naive, by 0.02 (0.01 to 0.03), but no variant is measurably faster with a result "
            "known to be as good: unsure is 1.60 × as fast (0.90 to 2.00), which may be chance.",
        ),
        (
            [FIRST_ROW, BETTER, judged(FAST, "PASS")],
            f"{IS_FAST}, and its result is no worse; slow has a better accuracy than naive, by 0.02 (0.01 to 0.03).",
        ),
        (
            [FIRST_ROW, BETTER, judged(FAST, "PASS", **better_by(-0.04, -0.05, -0.03))],
            f"{IS_FAST}, and has a better accuracy than naive, by 0.04 (0.03 to 0.05).",
        ),
        # Of the same mathematics another loss is a FAIL.
        ([FIRST_ROW, judged(SLOW, "FAIL", **better_by(-0.02, -0.03, -0.01))], f"{NOT_CERTAIN} {KNOWN}."),
    ],
)
def test_the_answer_in_one_sentence(rows, answer):
    assert headline(comparison(*rows, quality=any(row.verdict for row in rows))) == answer


def test_a_variant_is_called_in_a_sentence_as_the_comparison_says():
    step = replace(FAST, label="+ precision=bf16")
    ladder = replace(comparison(BASE, step), subject="naive with all up to {}")
    assert headline(ladder) == "naive with all up to precision=bf16 is 1.41 × as fast as naive (1.30 to 1.50)."


def to_target(*rows):
    return replace(comparison(*rows, quality=True), target="accuracy>=0.9")


def test_with_a_target_variants_are_ranked_by_the_time_to_it():
    base = arriving(BASE, *[10.0, 10.5, 9.8, 10.1, 10.2, 9.9, 10.3, 10.0])
    soon, never = arriving(UNSURE, *[5.0, 5.2, 4.9, 5.1, 5.05, 4.95, 5.15, 5.0]), arriving(FAST, *[None] * 8)
    found = to_target(base, never, soon, FAILED)
    assert headline(found).startswith(
        "unsure reaches accuracy>=0.9 sooner than naive, 2.00 × as fast (1.99 to 2.01): 5.0 s (median), by 8 of 8 seeds. "
        "No variant is measurably faster"
    )
    shown = table(found)
    assert [*shown.header][:5] == ["variant", "reached", "time to accuracy>=0.9", "updates to it", "sooner"]
    assert [row[:3] for row in shown.texts()] == [
        ["unsure", "8 of 8", "5.0 s"],
        ["naive", "8 of 8", "10.1 s"],
        ["fast <b>", "0 of 8", "not reached"],
        ["failed", "0 of 0", "not reached"],
    ]
    assert shown.winner == 0


TIMED, NEVER = arriving(BASE, 10.0, 11.0, 9.0), arriving(FAST, None, None, None)
NOT_SOONER = "No variant reaches accuracy>=0.9 certainly sooner than "


@pytest.mark.parametrize(
    ("rows", "begins"),
    [
        ([NEVER, NEVER], "No variant reaches accuracy>=0.9."),
        ([TIMED, NEVER], f"{NOT_SOONER}naive; the first in the order is naive: 10.0 s (median), by 3 of 3 seeds."),
        (
            [replace(NEVER, label="naive"), replace(TIMED, label="late")],
            f"{NOT_SOONER}naive; the first in the order is late: 10.0 s (median), by 3 of 3 seeds.",
        ),
        (
            [NEVER, arriving(UNSURE, 4.0, None, None)],
            f"{NOT_SOONER}fast <b>; the first in the order is unsure: 1 of 3 seeds.",
        ),
    ],
)
def test_what_is_not_certainly_sooner_is_no_winner(rows, begins):
    assert headline(to_target(*rows)).startswith(begins)


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
