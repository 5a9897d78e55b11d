"""`drivetrain tune`: what it takes is faster, what it leaves is not, and nothing of it reaches the run."""

import math
import re
import warnings
from pathlib import Path

import pytest

from drivetrain.config.catalog import options
from drivetrain.launch.job import prepare
from drivetrain.measure import changes
from drivetrain.measure.benchmark.compare import Comparison, Row
from drivetrain.measure.benchmark.variants import TimesToTarget, TrainedRun, columns, proven
from drivetrain.measure.claims.export import recommend
from drivetrain.measure.intervals import Interval
from drivetrain.measure.tune import range_test, tune
from drivetrain.measure.tune.range_test import RangeTest
from drivetrain.recipe import reader as recipe
from tests.support import json_keys

OWN = [
    "data=own",
    "data.target=slow_set.Slow",
    "data.kwargs.pause=0.002",
    "trust=[slow_set]",
    "model=mlp",
    "batch.global_batch=8",
    "runtime.device=cpu",
]


# --- what is tried ---


def test_words_over_words():
    words = ["loader=workers", "loader.num_workers=24", "epochs=3", "batch.global_batch=64", "surgery=[no_bias_before_norm]"]
    assert changes.apply(words, ["loader=threads"]) == [words[2], words[3], words[4], "loader=threads"]
    assert changes.apply(words, ["loader.num_workers=2"]) == [words[0], *words[2:], "loader.num_workers=2"]
    assert words[3] in changes.apply(words, ["batch=accumulate", "batch.accumulation_steps=2"])


def tried(stage, *words):
    """The candidates of a stage of `tune what=all` for a run."""
    _, specs = tune.Tuning(tune.TuneSettings(), list(words), ()).candidates([*tune.STAGES["all"].values()][stage])
    return [spec.label for spec in specs]


LOADERS, ARITHMETIC, UPDATES, SPLITS, COMPILERS = range(5)
MLP = ["data=digits", "model=mlp", "batch.global_batch=12"]


def test_whatever_loads_or_compiles_is_tried():
    """A new option is tried without a word anywhere else."""
    found = {word.split()[0].partition("=")[2] for word in tried(LOADERS, "data=digits", "loader=sync")}
    assert found <= {*options()["loader"]} - {"sync", "auto"}
    assert found >= {"threads", "workers", "resident"}
    assert set(tune.compilers(prepare([]))) == {f"compile={option}" for option in options()["compile"]}


@pytest.mark.parametrize(
    ("stage", "words", "candidates"),
    [
        (SPLITS, MLP, ["batch=accumulate batch.accumulation_steps=2", "batch=accumulate batch.accumulation_steps=4"]),
        (
            SPLITS,
            [*MLP, "batch=accumulate", "batch.accumulation_steps=2"],
            ["batch=fixed", "batch=accumulate batch.accumulation_steps=4"],
        ),
        (SPLITS, ["data=digits", "batch=auto", "batch.memory_gb=4"], []),
        (ARITHMETIC, ["data=digits", "precision=bf16"], ["surgery=[channels_last]"]),
        (ARITHMETIC, [*MLP, "precision=bf16"], []),  # no convolution whose layout matters
        (UPDATES, [*MLP, "optimizer.fused=false", "checkpointing=blocks"], ["optimizer.fused=true", "checkpointing=none"]),
        (UPDATES, [*MLP, "optimizer.fused=null"], []),  # already the fastest
    ],
)
def test_what_the_run_has_is_not_tried(stage, words, candidates):
    assert tried(stage, *words) == candidates


def test_another_number_of_readers_is_tried():
    found = tried(LOADERS, *MLP, "loader=threads", "loader.num_threads=1")
    assert "loader=threads loader.num_threads=1" not in found
    assert "loader=threads loader.num_threads=2" in found


def test_a_whole_step_is_tried_with_what_it_wants():
    """Settings that make an update op by op would be refused beside it, and the fastest way never be seen."""
    job = prepare(["recipe=naive", "data=digits", "optimizer.fused=true"])
    (words,) = [w for w in tune.compilers(job) if w.startswith("compile=step")]
    assert set(words.split()[1:]) == {"optimizer.fused=null", "optimizer.foreach=null", "runtime.zero_grad=none"}
    prepare(changes.apply(["recipe=naive", "data=digits", "optimizer.fused=true"], words.split()))


def test_what_a_later_choice_overrides_is_no_longer_an_earlier_ones():
    tuning = tune.Tuning(tune.TuneSettings(), [], ())
    tuning._accept("loaders", "loader=threads loader.num_threads=2")
    tuning._accept("updates", "optimizer.fused=true")
    tuning._accept("compiling", "compile=step optimizer.fused=null")
    assert tuning.accepted == {"loaders": "loader=threads loader.num_threads=2", "compiling": "compile=step optimizer.fused=null"}
    tuning._accept("loaders", "loader=workers")
    assert tuning.current() == ["compile=step", "optimizer.fused=null", "loader=workers"]


# --- the range test ---


RATES = [10 ** (-6 + n / 20) for n in range(140)]


def sigmoid(rate: float, centre: float) -> float:
    return 2.3 - 2 / (1 + math.exp(-4 * (math.log10(rate) - centre)))


@pytest.mark.parametrize(
    ("rates", "losses", "steepest", "bound", "said"),
    [
        (RATES, [sigmoid(r, -2) + max(0.0, math.log10(r)) * 9 for r in RATES], 1e-2, 0.1, "advice"),
        # A fall after the lowest loss is noise.
        (RATES, [sigmoid(r, -3) for r in RATES[:100]] + [0.5] * 10 + [9.0] * 10 + [0.5] * 20, 1e-3, 0.0056, "advice"),
        (RATES[:4], [2.3, 2.31, 2.29, 2.3], None, None, "fell at no rate"),
    ],
)
def test_the_range_test_finds_where_the_loss_falls(rates, losses, steepest, bound, said):
    found = RangeTest(rates, losses, 0.1)
    assert found.steepest == (steepest and pytest.approx(steepest, rel=0.3))
    assert found.bound == (bound and pytest.approx(bound, rel=0.5))
    assert said in " ".join(range_test.advice(found))


def test_lr_is_advice_and_leaves_a_plot(command):
    _, told = command("tune", "data=digits", "model=mlp", "runtime.device=cpu", "what=lr", "lr_updates=60")
    folder = next(Path("outputs/tune").glob("*/*"))
    json_keys.check(told, **{"top": "range test", "range test": "rates losses steepest bound"})
    told = told["range test"]
    assert told["rates"][0] == range_test.LOW
    assert 1e-4 < told["steepest"] < 5
    assert "range" in (folder / "tune.html").read_text()
    assert not (folder / "recipe.yaml").exists()
    assert not list(Path("outputs").rglob("result.json"))


# --- the search ---


@pytest.mark.slow
def test_workers_are_found_for_data_that_sleeps(command, slow_set):
    done, told = command("tune", *OWN, "what=workers", "rounds=8", "block_s=0.2", "budget_s=300")
    folder = next(Path("outputs/tune").glob("*/*"))
    found = recipe.read(folder / "recipe.yaml")
    assert found.choices["loader"] in ("resident", "threads", "workers", "device"), done.stdout
    assert found.claim is not None
    assert found.claim.speed.ratio > 1
    json_keys.check_compare(told[tune.PROOF])
    assert told[tune.PROOF]["rows"][1]["ratio"][1] > 1


@pytest.mark.slow
def test_without_proof_nothing_is_kept(command, slow_set):
    """One round has no interval, so that no loader is taken, however fast."""
    done, told = command("tune", *OWN, "what=workers", "rounds=1", "block_s=0.02")
    assert "the config stays as it was" in done.stdout
    folder = next(Path("outputs/tune").glob("*/*"))
    assert any(row["ratio"] for row in told["How data is read"]["rows"])
    assert not (folder / "recipe.yaml").exists()
    assert not list(Path("outputs").rglob("result.json"))


def test_what_is_prescribed_replays_and_says_what_it_rests_on(tmp_path, capsys):
    here = {"global_batch": 128, "device": "this one", "device_type": "cpu"}
    base = Row("as it was", [], samples_per_second=100.0, **here)
    row = Row("loader=threads", [], ratio=Interval(2.0, 1.8, 2.2), samples_per_second=200.0, **here)
    words = ["recipe=naive", "data=digits", "model=mlp", "loader=workers", "loader.num_workers=24", "runtime.device=cpu"]
    recommend("tune", words, ["loader=threads", "loader.num_threads=2"], (), base, row, tmp_path, ["quality: PASS"])
    said = capsys.readouterr().out
    assert "2.00 × the samples a second (1.80 to 2.20)" in said
    assert "loader.num_workers" not in said
    assert re.findall(r"recipe.yaml (.*)", said) == ["runtime.device=cpu"] * 2
    text = (tmp_path / "recipe.yaml").read_text()
    assert "# quality: PASS" in text
    found = recipe.read(tmp_path / "recipe.yaml")
    assert found.claim is not None
    assert found.claim.speed.against == {"loader": "workers", "loader.num_workers": 24}
    tuned = ["recipe=naive", "data=digits", "model=mlp", "loader=threads", "loader.num_threads=2"]
    assert prepare([f"recipe={tmp_path / 'recipe.yaml'}"]).config_hash == prepare(tuned).config_hash


def test_another_global_batch_is_said(tmp_path, capsys):
    base = Row("", [], samples_per_second=1.0, global_batch=128)
    row = Row("", [], ratio=Interval(2.0, 1.8, 2.2), samples_per_second=2.0, global_batch=512)
    recommend("doctor", ["data=digits"], ["batch.global_batch=512"], (), base, row, tmp_path)
    assert "512 samples now, not 128" in capsys.readouterr().out


BASE, LIKELY, BETTER = [100.0] * 8, [104.0, 99, 105, 106, 98, 104, 103, 105], [110.0] * 8
UNLIKELY = [101.0, 99, 100, 102, 98, 101, 99, 100]
TWICE, AS_FAST = [200.0] * 8, [101.0, 99.0] * 4
RUNS = {"as long": ([20.0] * 8, [21.0] * 8, [20.1, 19.9] * 4), "shorter": ([20.0] * 8, [19.0] * 8, [20.1, 19.9] * 4)}
RUNS["not known"] = ([20.0] * 8, [], [20.1, 19.9] * 4)


@pytest.mark.parametrize(
    ("rates", "runs", "taken"),
    [
        ([BASE, LIKELY, UNLIKELY], (), "1"),
        ([BASE, LIKELY, BETTER], (), "2"),
        ([BASE, UNLIKELY, [50.0, 50.0], []], (), None),
        ([BASE, [200.0] * 3], (), None),
        # Updates that are twice as fast, and the whole run no shorter, as it starts later.
        ([BASE, TWICE, AS_FAST], RUNS["as long"], None),
        ([BASE, TWICE, AS_FAST], RUNS["shorter"], "1"),
        ([BASE, TWICE, AS_FAST], RUNS["not known"], "1"),
    ],
)
def test_what_likely_makes_the_run_shorter_is_taken_on(rates, runs, taken):
    rows = [Row(str(n), [], rates=each) for n, each in enumerate(rates)]
    for row, seconds in zip(rows, runs, strict=False):
        row.runs_s = seconds
    best = tune._best(rows)
    assert (best and best.label) == taken


def test_a_worse_result_is_taken_back():
    tuning = tune.Tuning(tune.TuneSettings(), [], ())
    tuning.accepted = {"how data is read": "loader=threads", "precision and memory layout": "precision=bf16"}
    tuning._drop_suspect("loss worse")
    assert tuning.accepted == {"how data is read": "loader=threads"}
    assert "is dropped" in tuning.notes[0]


def test_warnings_of_what_is_tried_are_not_printed(monkeypatch, tiny, recwarn):
    monkeypatch.setattr(tune, "_range_test", lambda *given: warnings.warn("torch's own", UserWarning, stacklevel=1))
    monkeypatch.setattr(tune, "_report", lambda *given: None)
    assert tune.command(tiny("what=lr")) == 0
    assert not recwarn.list


def test_the_end_of_the_time_is_said(monkeypatch, capsys):
    """In the table, in a note below it and in the sentence: what was not measured to the end may still be faster."""
    tuning = tune.Tuning(tune.TuneSettings(budget_s=10.0, rounds=8), [], ())

    def measured(specs, settings, overrides, stopping_rule):
        rows = [Row(spec.label, [], rates=[100.0] * 3, ratio=Interval(1.0, 0.0, math.inf)) for spec in specs]
        assert stopping_rule(rows) == rows[1:]
        rows[1].stopped_after = 3
        return Comparison(rows, [], [], settings, {}, 1.0)

    monkeypatch.setattr(tune.compare, "measure", measured)
    monkeypatch.setattr(tuning, "candidates", lambda stage: (Row("as it is", []), [Row("loader=threads", [])]))
    left = iter([10.0, 1.0])  # the search may start, and its time is over after some rounds
    monkeypatch.setattr(tuning, "seconds_left", lambda: next(left))
    tuning.run("how data is read", lambda job: ["loader=threads"])
    said = capsys.readouterr().out
    assert "out of time after 3 rounds" in said
    assert "the time was over after 3 of 8 rounds, and 1 of the candidates were undecided" in said
    assert tune.conclusion(tuning, None, None).startswith("The time was over before the search of how data is read was done")


# --- `drivetrain tune target=…`, on made-up arrivals: batches near the noise scale, ranked by the time to a target ---


def variant(label, *seconds):
    return TimesToTarget(label, list(seconds), [None if s is None else int(10 * s) for s in seconds])


def test_batches_near_the_noise_scale_are_tried_with_a_rate_that_follows():
    run = prepare(["data=digits", "model=mlp", "batch.global_batch=128"]).run
    found = tune.candidates(run, 60.0, 1150)
    assert found == [
        f"batch.global_batch={n} batch.lr_scaling=sqrt batch.base_batch=128" for n in (32, 64)
    ]  # 128 is the run's own
    assert tune.candidates(run, None, 1150) == []
    assert tune.candidates(run, 1e6, 1150) == []
    two = prepare(["data=digits", "model=mlp", "batch=accumulate", "batch.accumulation_steps=3", "batch.global_batch=12"]).run
    assert [int(w.split()[0].rpartition("=")[2]) % 3 for w in tune.candidates(two, 60.0, 1150)] == [0, 0, 0]


def test_what_does_not_arrive_is_last_and_stays():
    never, slow, soon, half = variant("n", None, None), variant("s", 9.0, 9.1), variant("f", 3.0, 3.1), variant("h", 1.0, None)
    assert [a.label for a in sorted([never, slow, half, soon], key=lambda variant: variant.rank)] == ["f", "s", "h", "n"]
    assert math.isinf(never.median)
    assert [cell for (cell,) in columns([never], slow, "it").values()] == ["0 of 2", "not reached", "–", "–"]


def test_only_what_is_sooner_beyond_doubt_is_kept():
    base = variant("as it is", 10.0, 10.5, 9.8, 10.1, 10.2, 9.9, 10.3, 10.0)
    better = variant("b", *[s / 2 for s in base.seconds])
    doubtful = variant("d", 9.0, 11.5, 9.8, 8.1, 12.2, 9.9, 10.3, 9.0)
    losing = variant("l", *[1.0] * 7, None)
    assert proven([base, doubtful, better]) == 2
    assert proven([base, doubtful]) is None
    assert proven([base, losing]) is None
    assert proven([base]) is None


@pytest.mark.parametrize(("seconds", "trained"), [(1e6, 5), (-1.0, 3)])
def test_more_than_three_seeds_are_trained_only_while_there_is_time(seconds, trained):
    order = []

    def train(n, number):
        order.append(n)
        return TrainedRun(number, 1)

    assert [[run.seed for run in runs] for runs in tune.train_all(2, train, 5, seconds)] == [[*range(trained)]] * 2
    assert order[:4] == [0, 1, 1, 0]
