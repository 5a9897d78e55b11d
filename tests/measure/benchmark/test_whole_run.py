"""Made-up rounds of an arm: what it is worth with its start-up, whether it needs more of them; and one start that is measured."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain.core.cost import Cost
from drivetrain.measure.benchmark import row as rounds_of
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.benchmark.comparison import Comparison
from drivetrain.measure.benchmark.overview import headline
from drivetrain.measure.benchmark.row import Row
from drivetrain.measure.claims import write

BATCH = 10


def arm(starts: list[float], step_s: float, label: str = "arm", **facts: Any) -> Any:
    """An arm whose rounds have these starts, and updates that take `step_s`."""
    block = SimpleNamespace(rate=BATCH / step_s, seconds=20 * step_s, updates=20, step_s=[step_s], data_wait_s=0.0, peak_memory=1)
    facts |= {"global_batch": BATCH, "samples": 1000}
    return SimpleNamespace(label=label, starts=starts, blocks=[block] * len(starts), facts=facts, error=None, stopped_after=None,
                           job=object())  # fmt: skip


def weighed(updates: int | None, *arms: Any) -> list[Row]:
    found = [Row.of(ArmSpec(each.label, [], None, []), each, arms[0]) for each in arms]
    for row, each in zip(found, arms, strict=True):
        row.weigh(each, found[0], updates)
    return found


def answer(rows: list[Row]) -> str:
    return headline(Comparison(rows, [], [], SimpleNamespace(quality=False), {}, 1.0))


def timed(*rates: float, seconds: float = 1.0, wait: float = 0.0) -> Any:
    """An arm of whose run no length is known."""
    blocks = [SimpleNamespace(rate=r, step_s=[0.1], data_wait_s=wait, seconds=seconds, peak_memory=1) for r in rates]
    return SimpleNamespace(blocks=blocks, facts={}, error=None, stopped_after=None, starts=[], job=None)


SPEC = ArmSpec("arm", [], None, [])
PLAIN = arm([1.0] * 7, 0.1, "plain")
COMPILED = arm([501.0, *[11.0] * 6], 0.05, "compiled", compiled_anew=True)


def test_a_cost_pays_from_the_steps_on_that_make_up_for_its_start():
    late, plain = Cost(start=11.0, step=0.05), Cost(start=1.0, step=0.1)
    assert late.of(200) == plain.of(200) == pytest.approx(21.0)
    assert late.pays_after(plain) == 200
    assert Cost(0.5, 0.05).pays_after(plain) == 0
    assert plain.pays_after(late) is None
    assert Cost(1.0, 0.1).pays_after(plain) is None


def test_a_first_start_that_compiles_is_told_beside_those_with_filled_caches():
    plain, compiled = weighed(300, PLAIN, COMPILED)
    assert (plain.start_s, plain.first_start_s, compiled.start_s, compiled.first_start_s) == (1.0, None, 11.0, 501.0)
    assert (compiled.pays_after, compiled.first_pays_after) == (200, 10_000)
    assert compiled.run_s == pytest.approx(26.0)
    assert compiled.whole_run.middle == pytest.approx(31 / 26)
    assert [*compiled.figures().values()][-3:] == ["11.0 s (uncompiled: 501.0)", "200 updates (uncompiled: 10,000)", "26.0 s"]
    cached = arm([12.0, *[11.0] * 6], 0.05)
    assert weighed(300, PLAIN, cached)[1].first_start_s is None


@pytest.mark.parametrize(("updates", "worth"), [(165, False), (200, False), (201, True), (20_000, True)])
def test_the_runs_own_length_decides(updates, worth):
    plain, compiled = weighed(updates, PLAIN, COMPILED)
    assert compiled.ratio.low == pytest.approx(2.0)
    assert (compiled.gain.low > 1) is worth
    assert bool(compiled.pays_too_late) is not worth
    assert ("compiled is 2.00 × as fast as plain" in answer([plain, compiled])) is worth


def test_the_answer_says_which_faster_updates_start_too_late():
    assert answer(weighed(165, PLAIN, COMPILED)) == (
        "No variant is measurably faster than plain. compiled has faster updates and starts later, which makes this run no "
        "shorter: it pays after 200 updates, and this run has 165."
    )
    assert answer(weighed(300, PLAIN, COMPILED)) == (
        "compiled is 2.00 × as fast as plain (2.00 to 2.00). Where its kernels are not compiled yet, it pays after 10,000 "
        "updates; this run has 300."
    )
    assert answer(weighed(20_000, PLAIN, COMPILED)) == "compiled is 2.00 × as fast as plain (2.00 to 2.00)."


def test_what_starts_sooner_may_win_with_slower_updates():
    rows = weighed(20, arm([11.0] * 7, 0.05, "workers"), arm([1.0] * 7, 0.1, "sync"))
    assert rows[1].ratio.high < 1
    assert rows[1].pays_after is None
    assert answer(rows) == "sync is 4.00 × as fast as workers for the whole run, as it starts sooner (4.00 to 4.00)."


def test_where_the_length_is_not_known_the_updates_decide():
    _, compiled = weighed(None, PLAIN, COMPILED)
    assert compiled.gain == compiled.ratio
    assert (compiled.run_s, compiled.pays_after, compiled.pays_too_late) == (None, 200, "")


def test_a_start_is_later_only_where_the_rounds_agree():
    assert rounds_of.later_start([9.0, 1.2, 1.3, 1.1], [1.0, 1.0, 1.0, 1.0]) == pytest.approx(0.2)
    assert rounds_of.later_start([9.0, 1.2, 0.9, 1.1], [1.0, 1.0, 1.0, 1.0]) == 0.0
    assert rounds_of.later_start([9.0], [1.0]) == 8.0


def test_rounds_drop_an_arm_by_the_whole_run(monkeypatch):
    """Its updates are twice as fast, and the run is over before that pays."""
    monkeypatch.setattr(rounds_of, "updates_of", lambda job, samples: 165)
    assert list(rounds_of.no_gain([PLAIN, COMPILED], 7)) == [COMPILED]
    assert list(rounds_of.behind([COMPILED, PLAIN], 7)) == []
    monkeypatch.setattr(rounds_of, "updates_of", lambda job, samples: None)
    assert list(rounds_of.no_gain([PLAIN, COMPILED], 7)) == []
    assert list(rounds_of.behind([COMPILED, PLAIN], 7)) == [PLAIN]


def test_a_recipe_says_what_the_run_takes_and_when_it_pays():
    plain, compiled = weighed(300, PLAIN, COMPILED)
    assert write.of_the_run(compiled, plain) == [
        "the run of 300 updates takes 26.0 s, start-up included, in place of 31.0 s",
        "it pays after 10,000 updates where its kernels are not compiled yet, as in a first run",
    ]
    assert write.of_the_run(*weighed(None, COMPILED, PLAIN)) == []


def test_an_arm_that_has_too_few_rounds_has_no_interval_in_the_file():
    rows = weighed(300, arm([1.0], 0.1), arm([2.0], 0.05))
    found = Comparison(rows, [], [], SimpleNamespace(quality=False), {}, 1.0).as_dict()["rows"][1]["whole_run"]
    assert found == [pytest.approx(31 / 17), None, None]


def test_an_arm_stops_when_its_ratio_is_known_to_two_per_cent():
    base, near = [100.0 + n % 2 for n in range(8)], [200.0 + n % 3 / 2 for n in range(8)]
    wide = [200.0, 210.0, 190.0, 205.0, 195.0, 220.0, 185.0, 200.0]
    arms = [timed(*base), timed(*near), timed(*wide)]
    assert list(rounds_of.precise(arms, 8)) == [arms[1]]
    assert list(rounds_of.precise(arms, rounds_of.MIN_ROUNDS - 1)) == []  # narrow by chance


@pytest.mark.parametrize(("slower", "rounds", "dropped"), [(2, 2, True), (1, 2, False), (2, 3, False), (3, 4, True)])
def test_an_arm_is_dropped_where_it_lost_clearly_more_than_half(slower, rounds, dropped):
    made = timed(*[90.0] * slower, *[110.0] * (rounds - slower))
    base = timed(*[100.0] * rounds)
    assert (list(rounds_of.no_gain([base, made], rounds)) == [made]) is dropped
    assert (list(rounds_of.behind([base, made], rounds)) == [made]) is dropped


def test_the_baseline_is_never_dropped_and_what_is_near_the_best_stays():
    base, best, near, far = (timed(*[rate] * 4) for rate in (100.0, 200.0, 198.0, 150.0))
    assert list(rounds_of.behind([base, best, near, far], 4)) == [far]


@pytest.mark.parametrize(("cost", "told", "faster"), [(0.0, "no difference", False), (0.05, "", False), (-0.05, "", True)])
def test_a_against_a_is_no_difference_and_a_planted_cost_is_seen(cost, told, faster):
    """Rounds drift together by 30 %, and each arm has 0.5 % of noise of its own."""
    random, rounds = Random(0), 20
    drift = [random.uniform(0.7, 1.0) for _ in range(rounds)]
    base, other = ([100 * share * d * random.gauss(1, 0.005) for d in drift] for share in (1.0, 1 / (1 + cost)))
    rows = [
        Row.of(ArmSpec(label, [], None, []), each, timed(*base)) for label, each in (("a", timed(*base)), ("b", timed(*other)))
    ]
    assert rows[1].interval().partition("  ")[2] == told
    assert rows[1].ratio.low < 1 / (1 + cost) < rows[1].ratio.high
    assert rows[1].ratio.differs is bool(cost)
    assert answer(rows).startswith("b is 1.05 × as fast as a (" if faster else "No variant is measurably faster than a.")


def test_an_arm_that_stopped_is_compared_with_its_own_rounds():
    """The machine became twice as slow after the arm had stopped: that changes no ratio."""
    base, stopped = timed(*[100.0] * 6, *[50.0] * 6), timed(*[200.0] * 6)
    assert Row.of(SPEC, stopped, base).ratio.middle == pytest.approx(2.0)


def test_the_share_of_waiting_is_that_of_the_whole_time():
    made = timed(1.0, 1.0, seconds=4.0, wait=1.0)
    assert Row.of(SPEC, made, made).data_wait == 0.25


CACHED = """
import time
import torch

class Cached(torch.utils.data.Dataset):
    classes = ("a", "b")

    def __init__(self, split, cached):
        self.pause = 0.0 if cached else 0.004
        if cached:
            time.sleep(0.5)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.pause)
        return torch.full((8,), index / 64), index % 2
"""


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "worth"), [(2, False), (4000, True)])
def test_a_planted_start_counts_by_the_runs_length(command, tiny, tmp_path, monkeypatch, updates, worth):
    """A set that reads its samples ahead: half a second at the start, and updates that are many times as fast."""
    (tmp_path / "cached_set.py").write_text(CACHED)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["data=own", "data.target=cached_set.Cached", "trust=[cached_set]", "data.kwargs.cached=false,true"]
    lengths = [f"updates={updates}", "epochs=100000", "rounds=7", "block_s=0.1"]
    done, found = command("compare", *tiny(*words, *lengths))
    assert done.returncode == 0, done.stderr
    plain, cached = found["rows"]
    assert plain["run_updates"] == cached["run_updates"] == updates
    assert cached["ratio"][1] > 1
    assert cached["start_s"] - plain["start_s"] > 0.4  # of the training set alone: the others are read before
    assert 2 < cached["pays_after"] < 4000
    assert (cached["whole_run"][1] > 1) is worth
    assert ("which makes this run no shorter: it pays after" in done.stdout) is not worth
