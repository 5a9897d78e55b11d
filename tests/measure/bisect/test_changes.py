"""`drivetrain bisect`: its single changes, what it refuses, and that all changes together are BAD."""

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench import bisect as campaign

from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.benchmark.variants import TrainedRun, VariantSpec
from drivetrain.measure.bisect import bisect, search
from drivetrain.measure.bisect.search import (
    FAILS,
    NAMED,
    NONE,
    UNKNOWN,
    UNRESOLVED,
    BisectSettings,
    ChangeSearch,
    GoodFails,
    Measured,
    Measurer,
    QualityMeasurer,
    Subsets,
    Unresolved,
    numbers,
    tried,
)
from drivetrain.measure.changes import Change, in_order
from drivetrain.measure.intervals import Interval
from tests.support import json_keys, made_pages


def prepared(good, bad, *common, quality=False):
    subsets = bisect.prepare([good, bad, *common], (), quality)
    return subsets, subsets.bad.job, subsets.notes


def keys(subsets):
    return {change.key: (change.good, change.bad) for change in subsets.numbered}


def plain(subsets, *chosen):
    numbers = {change.key: number for number, change in enumerate(subsets.numbered)}
    return subsets.variant(frozenset(numbers[key] for key in chosen)).job.composed


def test_an_option_and_its_keys_are_one_change_and_values_are_one_each():
    subsets, _, notes = prepared(
        "optimizer=sgd optimizer.nesterov=true log_every=1 epochs=3",
        "optimizer=adamw optimizer.lr=0.5 log_every=50 runtime.zero_grad=memset",
        "model=mlp",
    )
    assert keys(subsets) == {
        "optimizer": ("sgd", "adamw"),
        "runtime.zero_grad": ("none", "memset"),
        "log_every": ("1", "50"),
    }
    assert notes == ["not tried, though they differ: epochs"]
    mixed = plain(subsets, "optimizer")
    assert (mixed.choice("optimizer"), mixed.plain["optimizer"]["lr"], mixed.plain["log_every"]) == ("adamw", 0.5, 1)
    assert "nesterov" not in mixed.plain["optimizer"]
    assert mixed.choice("saving") == "none"
    mixed = plain(subsets, "log_every")
    assert (mixed.choice("optimizer"), mixed.plain["optimizer"]["nesterov"], mixed.plain["log_every"]) == ("sgd", True, 50)


def test_items_of_a_list_are_changes_of_their_own_and_keep_their_keys():
    subsets, job, _ = prepared(
        "augment=[flip_crop,random_erasing] augment.flip_crop.pad=2",
        "augment=[flip_crop,mixup] augment.flip_crop.pad=1",
        "model=mlp",
    )
    assert set(keys(subsets)) == {"augment.flip_crop.pad", "augment=[random_erasing]", "augment=[mixup]"}
    mixed = plain(subsets, "augment=[mixup]")
    assert mixed.choice("augment") == ["flip_crop", "random_erasing", "mixup"]
    assert mixed.plain["augment"]["flip_crop"]["pad"] == 2
    assert job.composed.choice("augment") == ["flip_crop", "mixup"]
    assert job.composed.plain["augment"]["flip_crop"]["pad"] == 1


def test_keys_of_the_users_own_mappings_are_changes():
    subsets, _, _ = prepared(
        "model.kwargs.a=1 model.kwargs.b=1", "model.kwargs.a=2 model.kwargs.b=2",
        "model=own", "model.target=bench.bisect.BisectSettings", "trust=[bench]",
    )  # fmt: skip
    assert set(keys(subsets)) == {"model.kwargs.a", "model.kwargs.b"}
    assert plain(subsets, "model.kwargs.b").plain["model"]["kwargs"] == {"a": 1, "b": 2}


def test_recipes_and_runs_are_sides_too(tmp_path):
    Path("mine.yaml").write_text("defaults:\n  - override /model: mlp\noptimizer:\n  lr: 0.01\n")
    run = tmp_path / "run"
    run.mkdir()
    prepare_job(["model=mlp", "optimizer.lr=0.05", "runtime.threads=1"]).write_files(run)
    subsets, job, _ = prepared(str(run), "mine.yaml", "batch.global_batch=12")
    assert keys(subsets) == {"optimizer.lr": ("0.05", "0.01"), "runtime.threads": ("1", "null")}
    assert job.composed.plain["optimizer"]["lr"] == 0.01
    assert subsets.variant(frozenset()).job.composed.plain["optimizer"]["lr"] == 0.05


def test_an_item_that_only_good_has_and_each_stage_are_changes_of_their_own():
    stages = "stages=[{until:0.5,clip:norm},{model.freeze:[layers.0.*]}]"
    subsets, job, _ = prepared("surgery=[channels_last]", stages, "epochs=4", "model=resnet9")
    assert [*keys(subsets)] == [
        "surgery=[channels_last]",
        "stage until 0.5: clip=norm",
        "stage to the end: model.freeze=[layers.0.*]",
    ]
    assert (job.composed.choice("surgery"), len(job.run.stages)) == ([], 2)
    mixed = subsets.variant(frozenset({1})).job
    assert (mixed.composed.choice("surgery"), len(mixed.run.stages[1].changes)) == (["channels_last"], 0)


def test_what_is_refused_alone_comes_after_what_it_needs_or_with_it():
    a, b, c, d = (Change(key, "0", "1") for key in "abcd")

    def can_run(chosen):
        return (a not in chosen or c in chosen) and (b in chosen) == (d in chosen)

    order = in_order([a, b, c, d], can_run)
    assert [change.key for change in order] == ["c", "a", "b and d"]
    assert order[2].parts == (b, d)


def test_values_that_are_refused_without_each_other_are_one_change():
    """7 micro-batches do not divide 20 samples, nor 2 divide 21."""
    subsets, _, notes = prepared(
        "batch.accumulation_steps=2 batch.global_batch=20",
        "batch.accumulation_steps=7 batch.global_batch=21 clip=norm",
        "batch=accumulate",
        "model=mlp",
    )
    assert set(keys(subsets)) == {"clip", "batch.global_batch and batch.accumulation_steps"}
    assert notes[0].startswith("kept together: batch.global_batch and batch.accumulation_steps (")


def test_a_share_of_nothing_has_no_sign():
    whole, none = Measured(Interval(0.3, 0.2, 0.4), 6), Measured(Interval(-0.001, -0.1, 0.1), 6)
    search = ChangeSearch(2, Measurer(None, BisectSettings(), 0.0), {frozenset({0, 1}): whole, frozenset({0}): none}, NAMED)
    assert [row[3] for row in tried(search).rows] == ["100 %", "0 %"]


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        (Measured(UNKNOWN), "BAD: not measured within budget_s=40"),
        (Measured(Interval(0.1, -math.inf, math.inf), 3), "BAD: 1.105 × samples/s (too few pairs for an interval)"),
    ],
)
def test_a_budget_that_was_too_small_is_told_in_a_sentence(whole, said):
    measurer = Measurer(Subsets(None, None, None, (), (), []), BisectSettings(budget_s=40), 0.0)
    search = ChangeSearch(1, measurer, {frozenset({0}): whole}, UNRESOLVED, reason="whether they differ is not certain")
    assert bisect.conclusion(search, 1.0)[-1].endswith(said)
    assert "inf" not in str(tried(search).rows)


def test_numbers_are_shown_as_ranges():
    assert numbers({0, 1, 2, 4, 7, 8}) == "1–3, 5, 8–9"
    assert numbers(()) == ""


def test_two_changes_that_need_each_other_take_no_third_with_them():
    def can_run(chosen):
        keys = {key for change in chosen for key in change.key.split(" and ")}
        return ("a" in keys) == ("b" in keys) and ("d" not in keys or "a" in keys)

    order = in_order([Change(key, "0", "1", (f"{key}=1",)) for key in "abcd"], can_run)
    assert [change.key for change in order] == ["c", "a and b", "d"]


def test_the_keys_of_the_file():
    found = bisect.as_dict(made_pages.bisected(), 9.0, {})
    tried = "changes effect pairs problem diverged"
    json_keys.check(found, top=json_keys.BISECT, causes="changes effect overrides", changes="key good bad", tried=tried)


# --- the search of `drivetrain bisect`, with effects that are known: what it names, and with how many comparisons ---

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
    search = ChangeSearch(N, Exact(effect, **kwargs))
    search.run()
    return search


@pytest.mark.parametrize("sign", [-1, 1])
def test_each_single_cause_is_named_within_the_promised_comparisons(sign):
    for guilty in range(N):
        search = searched(lambda chosen, guilty=guilty: sign * 0.2 * (guilty in chosen))
        assert (search.outcome, search.causes, search.rest.effect.middle) == (NAMED, [(guilty,)], 0)
        assert search.comparisons <= 2 * math.log2(N)


def test_each_pair_that_acts_only_together_is_named():
    most = 0
    for a in range(N):
        for b in range(a):
            search = searched(lambda chosen, pair={a, b}: -0.2 * (pair <= chosen))
            assert search.causes == [(b, a)]
            most = max(most, search.comparisons)
    assert most == 13  # as docs/bisect.md says


@pytest.mark.parametrize(
    ("effect", "more", "outcome", "causes"),
    [
        (lambda chosen: -0.2 * (3 in chosen) - 0.1 * (9 in chosen), {}, NAMED, [3, 9]),  # they add up
        (lambda chosen: -0.1 * (3 in chosen) - 0.1 * (9 in chosen), {}, NAMED, [3, 9]),
        (lambda chosen: -0.2 * bool({3, 9} & chosen), {}, NAMED, [3, 9]),  # each is enough
        # Change 8 slows down and is refused without 2: both belong to the smallest set that can be made.
        (lambda chosen: -0.2 * (8 in chosen), {"refused": lambda chosen: 8 in chosen and 2 not in chosen}, NAMED, [2, 8]),
        (lambda chosen: 0.003, {}, NONE, []),
        (lambda chosen: 0.0, {"refused": lambda chosen: True}, FAILS, []),
        (lambda chosen: -0.3 * (len(chosen) == N), {}, UNRESOLVED, []),  # spread over all changes
        (lambda chosen: -0.2 * (5 in chosen), {"half_width": 0.03}, NAMED, [5]),
        (lambda chosen: -0.2 * (5 in chosen) - 0.2 * (6 in chosen), {"half_width": 0.3}, UNRESOLVED, []),
        (lambda chosen: -0.2 * len(chosen) / N, {"half_width": 0.06}, UNRESOLVED, []),
    ],
)
def test_the_smallest_causes_are_named_or_why_none_is(effect, more, outcome, causes):
    search = searched(effect, **more)
    assert (search.outcome, sorted(change for cause in search.causes for change in cause)) == (outcome, causes)
    assert search.comparisons == 1 or outcome != NONE
    assert bool(search.suspects and search.reason) is (outcome == UNRESOLVED)


def test_what_is_left_to_suspect_and_why_is_told():
    wide = searched(lambda chosen: -0.2 * (5 in chosen), half_width=0.3)
    assert (wide.suspects, wide.reason) == (tuple(range(N)), "whether they differ is not certain")
    assert "spread over many" in searched(lambda chosen: -0.3 * (len(chosen) == N)).reason


def test_what_makes_training_diverge_is_bad():
    class Diverging(Exact):
        def measure(self, chosen, decided):
            return Measured(pairs=1, problem="diverged", diverged=True) if chosen == {4} else super().measure(chosen, decided)

    search = ChangeSearch(N, Diverging(lambda chosen: -0.2 * (4 in chosen)))
    search.run()
    assert search.causes == [(4,)]


def test_a_subset_is_measured_until_its_question_is_decided_and_goes_on_with_its_pairs():
    class Made(Measurer):
        ends: str | None = None

        def add(self, variant, figures, is_over):
            while self.ends is None and not is_over():
                figures.append(1.2 + len(figures) % 2 / 100)
            return self.ends

    subsets = SimpleNamespace(variant=lambda chosen: VariantSpec("", [], "a job"))
    measurer, late = (Made(subsets, BisectSettings(rounds=8), until) for until in (math.inf, 0.0))
    found = measurer.measure(frozenset({0}), lambda found: True)
    assert (found.pairs, found.effect.low > 0.18) == (6, True)
    assert measurer.measure(frozenset({0}), lambda found: False).pairs == 8, "as many as rounds="
    assert late.measure(frozenset({0}), lambda found: True) == Measured(UNKNOWN)
    measurer.ends = "diverged: the loss is nan"
    assert measurer.measure(frozenset({1}), lambda found: True) == Measured(None, 1, "diverged: the loss is nan", True)


def test_a_seed_is_trained_also_where_it_is_over_at_once_and_a_run_that_ends_says_why(monkeypatch):
    """So is one where it is asked whether a subset fails: a seed of GOOD, and one of the subset."""

    @contextlib.contextmanager
    def trainings(*_):
        yield lambda spec, seed: trained.append((spec.label, seed)) or runs[spec.label]

    trained, good = [], prepare_job(["model=mlp"])
    runs = {"": TrainedRun(0, 1, {"accuracy": 0.5}), "ema": TrainedRun(0, 1, {"accuracy": 0.75}), "lr": TrainedRun(0, 1)}
    runs["bad"] = TrainedRun(0, 1, error="diverged: the loss is nan")
    monkeypatch.setattr(search, "trainings", trainings)
    measurer = QualityMeasurer(SimpleNamespace(variant=lambda chosen: VariantSpec("", [], good)), BisectSettings(), 0.0)
    assert measurer.add(VariantSpec("ema", [], good), figures := [], lambda *_: len(figures) > 1) is None
    assert (figures, measurer.margin) == ([0.25, 0.25], 0.005 * 0.5)
    assert trained == [("", 0), ("ema", 0), ("", 1), ("ema", 1)]
    measurer.unit = "runs"  # as where it is asked what fails
    assert measurer.add(VariantSpec("ema", [], good), [], lambda *_: True) is None
    for label, why in (("bad", "diverged: the loss is nan"), ("lr", "failed: it evaluates no accuracy")):
        assert measurer.add(VariantSpec(label, [], good), [], lambda *_: True) == why
    runs[""].error = "failed: gone"
    with pytest.raises(GoodFails, match="gone"):
        measurer.add(VariantSpec("ema", [], good), [], lambda *_: True)


def test_what_makes_a_bad_fail_is_searched_among_the_subsets_that_run():
    class Failing(Measurer):
        def add(self, variant, figures, is_over):
            asked.append(variant.label)
            return "RuntimeError: boom" if variant.label >= {4, 6} else None

    asked = []
    subsets = SimpleNamespace(
        variant=lambda chosen: VariantSpec(chosen, [], None if 3 in chosen and 2 not in chosen else "a job")
    )
    measurer = Failing(subsets, BisectSettings(), 0.0)
    measurer.fails = True
    search = ChangeSearch(N, measurer)
    search.run()
    assert (search.outcome, search.causes) == (NAMED, [(4, 6)])
    assert measurer.shown(search.whole) == ("fails",)
    assert search.tried[frozenset({4, 6})].problem == "RuntimeError: boom"
    assert len(asked) == len(set(asked)), "none is run twice"


@pytest.mark.parametrize(
    ("effect", "decided", "is_high"),
    [
        ((-0.9, -1.3, -0.6), True, True),
        ((-0.6, -1.0, -0.2), False, None),
        ((-2.0, -3.4, -0.6), False, True),  # beyond BAD, but too wide to stop before the rounds are used
        ((-0.45, -0.6, -0.3), True, False),  # half of the step is on each side: either may be searched
    ],
)
def test_a_question_is_decided_by_an_interval_on_one_side_or_a_narrow_one(effect, decided, is_high):
    asked = []

    def measure(chosen, is_decided):
        asked.append(is_decided(Interval(*effect)))
        return Measured(Interval(*effect), 6)

    with pytest.raises(Unresolved) if is_high is None else contextlib.nullcontext():
        assert ChangeSearch(1, SimpleNamespace(measure=measure))._ask({0}, 0.0, -1.0)[0] is is_high
    assert asked == [decided]


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
