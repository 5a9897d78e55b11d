"""The search of `drivetrain bisect`, with effects that are known: what it names, and with how many comparisons."""

import math
from types import SimpleNamespace

import pytest
from bench import bisect as campaign

from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.bisect.measurers import Settings, Speed
from drivetrain.measure.bisect.search import FAILS, NAMED, NONE, UNRESOLVED, Between, Measured, Search
from drivetrain.measure.intervals import Interval

N = 15


class Exact:
    """Effects without noise; a subset of which `refused` is true cannot run."""

    margin = 0.02

    def __init__(self, effect, refused=lambda chosen: False, half_width=0.001):
        self.effect, self.refused, self.half_width = effect, refused, half_width

    def measure(self, chosen, decided):
        if self.refused(chosen):
            return Measured(problem="refused: a rule")
        value = self.effect(chosen)
        return Measured(Interval(value, value - self.half_width, value + self.half_width), 6)


def searched(effect, **kwargs):
    search = Search(N, Exact(effect, **kwargs))
    return search, search.run()


def named(answer):
    return [cause.changes for cause in answer.causes]


@pytest.mark.parametrize("sign", [-1, 1])
def test_each_single_cause_is_named_within_the_promised_comparisons(sign):
    for guilty in range(N):
        search, answer = searched(lambda chosen, guilty=guilty: sign * 0.2 * (guilty in chosen))
        assert (answer.outcome, named(answer)) == (NAMED, [(guilty,)])
        assert search.comparisons <= 2 * math.log2(N)
        assert answer.rest.effect.middle == 0


def test_each_pair_that_acts_only_together_is_named():
    most = 0
    for a in range(N):
        for b in range(a):
            search, answer = searched(lambda chosen, pair={a, b}: -0.2 * (pair <= chosen))
            assert named(answer) == [(b, a)]
            most = max(most, search.comparisons)
    assert most == 13  # as docs/bisect.md says


def test_causes_that_add_up_and_causes_that_are_each_enough():
    _, answer = searched(lambda chosen: -0.2 * (3 in chosen) - 0.1 * (9 in chosen))
    assert sorted(named(answer)) == [(3,), (9,)]
    _, answer = searched(lambda chosen: -0.2 * bool({3, 9} & chosen))
    assert sorted(named(answer)) == [(3,), (9,)]
    _, answer = searched(lambda chosen: -0.1 * (3 in chosen) - 0.1 * (9 in chosen))
    assert sorted(change for cause in named(answer) for change in cause) == [3, 9]


def test_a_change_that_another_needs_is_not_guilty_by_that():
    """Change 8 slows down and is refused without 2: both belong to the smallest set that can be made."""
    _, answer = searched(lambda chosen: -0.2 * (8 in chosen), refused=lambda chosen: 8 in chosen and 2 not in chosen)
    assert named(answer) == [(2, 8)]


def test_what_makes_training_diverge_is_bad():
    class Diverging(Exact):
        def measure(self, chosen, decided):
            return Measured(pairs=1, problem="diverged", diverged=True) if chosen == {4} else super().measure(chosen, decided)

    search = Search(N, Diverging(lambda chosen: -0.2 * (4 in chosen)))
    assert named(search.run()) == [(4,)]


def test_what_makes_a_bad_fail_is_searched_among_the_subsets_that_run():
    class Failing(Speed):
        def failure(self, chosen, variant):
            asked.append(chosen)
            return "RuntimeError: boom" if 6 in chosen else None

    asked = []
    subsets = SimpleNamespace(variant=lambda chosen: ArmSpec("", [], None if 3 in chosen and 2 not in chosen else "a job"))
    measurer = Failing(subsets, Settings(), 0.0, fails=True)
    search = Search(N, measurer)
    answer = search.run()
    assert (answer.outcome, named(answer)) == (NAMED, [(6,)])
    assert measurer.shown(answer.whole) == ("fails",)
    assert search.tried[frozenset({6})].problem == "RuntimeError: boom"
    assert len(asked) == len(set(asked)), "none is run twice"


def test_no_difference_names_none_and_a_bad_without_a_figure_is_told():
    search, answer = searched(lambda chosen: 0.003)
    assert (answer.outcome, search.comparisons) == (NONE, 1)
    assert searched(lambda chosen: 0.0, refused=lambda chosen: True)[1].outcome == FAILS


@pytest.mark.parametrize("half_width", [0.03, 0.3])
def test_too_much_noise_is_not_resolved_and_says_what_is_left(half_width):
    _, answer = searched(lambda chosen: -0.2 * (5 in chosen) - 0.2 * (6 in chosen) * (half_width > 0.1), half_width=half_width)
    if half_width > 0.1:  # not even whether they differ
        assert (answer.outcome, answer.suspects) == (UNRESOLVED, tuple(range(N)))
    else:
        assert named(answer) == [(5,)]
    noisy = Exact(lambda chosen: -0.2 * len(chosen) / N, half_width=0.06)
    answer = Search(N, noisy).run()
    assert answer.outcome == UNRESOLVED
    assert answer.suspects
    assert not answer.causes


def test_a_difference_that_is_spread_over_all_changes_is_no_single_ones():
    _, answer = searched(lambda chosen: -0.3 * (len(chosen) == N))
    assert answer.outcome == UNRESOLVED
    assert "spread over many" in answer.reason


def test_a_question_is_decided_by_an_interval_on_one_side_or_a_narrow_one():
    question = Between(0.0, -1.0)
    assert question.decided(Interval(-0.9, -1.3, -0.6))
    assert question.is_high(Interval(-0.9, -1.3, -0.6))
    assert not question.decided(Interval(-0.6, -1.0, -0.2))
    assert not question.decided(Interval(-2.0, -3.4, -0.6)), "beyond BAD, but too wide to trust"
    assert question.decided(Interval(-0.45, -0.6, -0.3)), "half of the step is on each side: either may be searched"
    assert not question.is_high(Interval(-0.45, -0.6, -0.3))


@pytest.mark.parametrize("kind", ["single", "pair", "none"])
def test_under_noise_planted_causes_are_named_and_nothing_is_planted_in_none(kind):
    share = 0.0 if kind == "none" else 0.2
    runs = [campaign.repeat(kind, share, seed, rounds=40) for seed in range(5)]
    assert sum(run["named"] == run["guilty"] for run in runs) == 5
    assert sum(bool(set(run["named"]) - set(run["guilty"])) for run in runs) == 0
    if kind == "single":
        assert max(run["comparisons"] for run in runs) <= 2 * math.log2(N)


@pytest.mark.slow
def test_the_campaign_names_19_of_20():
    found = campaign.simulate(20, rounds=40)
    for kind, summary in found.items():
        columns = summary["columns of runs"]
        if kind.split(",")[0] in ("single", "pair", "none") and ", 5 %" not in kind:
            assert summary["right"] >= 19, kind
        if kind.startswith("single"):
            assert sum(run[columns.index("comparisons")] <= 2 * math.log2(N) for run in summary["runs"]) >= 19, kind
