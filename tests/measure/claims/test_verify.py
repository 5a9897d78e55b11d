"""`drivetrain recipe verify`: each kind of a claim, held against runs that were made up, and once against true ones."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.measure.benchmark import comparison
from drivetrain.measure.benchmark.comparison import Comparison, Row
from drivetrain.measure.benchmark.training import Facts
from drivetrain.measure.claims import verify
from drivetrain.measure.claims.verify import (
    ALL,
    HOLDS,
    REFUTED,
    SKIPPED,
    UNTOLD,
    Answer,
    Differences,
    Seen,
    Settings,
    chance_of_fewer,
    exit_code,
)
from drivetrain.measure.intervals import Interval
from drivetrain.recipe import reader as recipe
from drivetrain.recipe.claim import Against, Claim, Data, Device, Energy, Memory, Quality, Speed, Target
from drivetrain.run import environment
from tests.support import json_keys

DATA = {"hash": "deadbeef0123", "of": "content", "samples": 1150}
CLAIM = Claim(
    quality=Quality("accuracy", "validation", 0.95, 5, 0.005, (0.9438, 0.9562)),
    target=Target("accuracy>=0.9", 5, 5, 300, 400, 3.0),
    memory=Memory(500, 5),
    energy=Energy(1000, 5),
    data=Data(**DATA),
    device=Device("cpu", "a chip, 2 threads"),
    versions={"torch": str(environment.version("torch"))},
    seeds=(0, 1, 2, 3, 4),
)
KIND = {kind.key: kind for kind in ALL}


def facts(seed: int, accuracy: float = 0.95, updates: int | None = 300, **more: Any) -> Facts:
    """A run with this seed, on the claim's machine and data."""
    figures = {"validation": {"accuracy": accuracy, "loss": 1 - accuracy}}
    given: dict[str, Any] = {
        "set": "validation", "figures": figures, "updates_to_target": updates,
        "seconds_to_target": None if updates is None else updates / 100, "peak_mib": 490.0, "joules": 900.0, "data": DATA,
        "kind": "cpu", "device": "a chip, 2 threads",
    }  # fmt: skip
    return Facts(seed, **{**given, **more})


def several(*accuracies: float, **more: Any) -> list[Facts]:
    return [facts(seed, accuracy, **more) for seed, accuracy in enumerate(accuracies, 5)]


def answered(kind: str, runs: list[Facts], claim: Claim = CLAIM, better: Any = max) -> Answer:
    """What the runs say of one kind of the claim."""
    differ = Differences.of(claim, runs[0].kind, runs[0].device, runs[0].data)
    return KIND[kind].answer(getattr(claim, kind), Seen(runs, differ, {"accuracy": better, "loss": min}))


# --- quality ---


@pytest.mark.parametrize(
    ("accuracies", "outcome"),
    [
        ((0.95, 0.945, 0.955), HOLDS),
        ((0.99, 0.991, 0.992), HOLDS),  # better than claimed
        ((0.94, 0.945, 0.943), HOLDS),  # worse by 0.0073: chance allows 0.0092
        ((0.938, 0.94, 0.936), REFUTED),  # worse by 0.012
        ((0.9, 0.91, 0.89), REFUTED),
        ((0.948,), HOLDS),  # one seed, by the claim's spread
        ((0.8,), REFUTED),
    ],
)
def test_the_final_metric_is_held_by_a_t_test(accuracies, outcome):
    answer = answered("quality", several(*accuracies))
    assert answer.outcome == outcome, answer
    assert "t-test at 2 %" in answer.because


def test_the_t_test_is_the_textbooks():
    """Against scipy's own two-sample test from the same statistics: it refutes on one side of the level, and not on the other."""
    from scipy.stats import ttest_ind_from_stats

    chances = []
    for mean in (0.9385, 0.9395, 0.9404, 0.9405, 0.9415, 0.9425):
        chances.append(ttest_ind_from_stats(mean, 0.005, 3, 0.95, 0.005, 5, alternative="less").pvalue)
        runs = several(mean - 0.005, mean, mean + 0.005)
        assert answered("quality", runs).outcome == (REFUTED if chances[-1] < 0.02 else HOLDS), chances
    assert 0.019 < chances[2] < 0.02 < chances[3] < 0.021


def test_what_is_lower_is_better_where_it_is():
    claim = replace(CLAIM, quality=Quality("loss", "validation", 0.05, 5, 0.005, (0.0438, 0.0562)))
    assert answered("quality", several(0.99, 0.991, 0.992), claim).outcome == HOLDS
    assert answered("quality", several(0.9, 0.91, 0.89), claim).outcome == REFUTED


def test_of_a_metric_without_a_direction_both_sides_count():
    for accuracies in ((0.99, 0.991, 0.992), (0.9, 0.91, 0.89)):
        answer = answered("quality", several(*accuracies), better=None)
        assert (answer.outcome, answer.because.startswith("apart by")) == (REFUTED, True)
    assert answered("quality", several(0.95, 0.945, 0.955), better=None).outcome == HOLDS


def test_seeds_without_any_spread_may_differ_by_half_a_percent():
    """As on a CPU of another kind, which rounds otherwise."""
    claim = replace(CLAIM, quality=Quality("accuracy", "validation", 1.0, 5, 0.0, (1.0, 1.0)))
    assert answered("quality", several(0.9955, 0.9955), claim).outcome == HOLDS
    assert answered("quality", several(0.9945, 0.9945), claim).outcome == REFUTED


def test_one_run_each_has_no_spread():
    claim = replace(CLAIM, quality=Quality("accuracy", "validation", 0.95, 1), seeds=(0,))
    assert answered("quality", several(0.95), claim)[3:] == (UNTOLD, "one run each shows no spread: set seeds=5")
    assert answered("quality", several(0.95, 0.951), claim)[3:] == (
        UNTOLD,
        "too few seeds: set seeds=5 (1 and 2 runs hardly show the spread)",
    )
    assert answered("quality", several(0.95, 0.951, 0.949, 0.95), claim).outcome == HOLDS


@pytest.mark.parametrize("claimed", [{"n": 1}, {"n": 3, "sd": 0.05}])
@pytest.mark.parametrize(("accuracies", "outcome"), [((0.92, 0.926), UNTOLD), ((0.92, 0.926, 0.914, 0.91, 0.93), REFUTED)])
def test_a_claim_cannot_allow_itself_what_it_likes(claimed, accuracies, outcome):
    """Of a made-up mean, with no spread or a large one: two seeds confirm neither, and the five of the hint refute both."""
    claim = replace(CLAIM, quality=Quality("accuracy", "validation", 0.999, **claimed), seeds=(0,) * claimed["n"])
    answer = answered("quality", several(*accuracies), claim)
    assert answer.outcome == outcome, answer
    assert outcome == REFUTED or "too few seeds: set seeds=5" in answer.because


def test_a_metric_that_varies_much_is_held_by_its_own_spread():
    """A loss that differs by a tenth from seed to seed, here too: chance allows a sixth of it."""
    claim = replace(CLAIM, quality=Quality("loss", "validation", 0.05, 5, 0.005, (0.0438, 0.0562)))
    assert answered("quality", several(0.952, 0.941, 0.947, 0.943, 0.952), claim).outcome == HOLDS
    assert answered("quality", several(0.945, 0.945, 0.945), claim).outcome == UNTOLD, "worse by a tenth, with no spread here"


def test_other_data_tell_nothing():
    answer = answered("quality", several(0.5, data={**DATA, "hash": "0123", "samples": 9}))
    assert answer[3:] == (UNTOLD, "other data: 9 samples here, 1150 claimed, fingerprint 0123, claimed deadbeef")
    assert answer.measured.startswith("accuracy 0.5"), "what was measured is shown"
    assert answered("quality", several(0.5, data=None)).because == "other data: the data here has no fingerprint"
    assert answered("quality", several(0.5, data=None), replace(CLAIM, data=None)).outcome == REFUTED


def test_another_device_tells_of_the_result_all_the_same():
    assert answered("quality", several(0.95, 0.94, kind="cuda", device="a card")).outcome == HOLDS
    assert answered("quality", several(0.5, 0.51, kind="cuda", device="a card")).outcome == REFUTED


def test_a_metric_that_is_not_evaluated_here():
    answer = answered("quality", [facts(5, figures={"test": {"accuracy": 1.0}})])
    assert answer[2:] == ("–", UNTOLD, "it is not measured here")


def test_a_run_that_ends_with_an_error():
    runs = [facts(5, error="diverged: the loss is nan")]
    assert answered("quality", runs)[3:] == (REFUTED, "the run with seed 5 ended: diverged: the loss is nan")
    on_card = [facts(5, error="compile=cudagraph needs CUDA", kind="cuda", device=None)]
    assert answered("quality", on_card).outcome == UNTOLD, "the claim's device has what this one has not"


# --- the target ---


@pytest.mark.parametrize(
    ("updates", "outcome", "why"),
    [
        ((300, 350, 250), HOLDS, "within 2 times the seconds"),
        ((100, 100, 100), HOLDS, "within 2 times the seconds"),
        ((450, 500, 390), HOLDS, "within 2 times the seconds"),  # one is no slower than the slowest claimed one
        ((450, 500, 410), REFUTED, "every seed needs more updates than the slowest claimed one: 1.8 % by chance"),
        ((450, 500, None), REFUTED, "every seed needs more updates"),
        ((None, None, None), REFUTED, "fewer seeds reach it: 1.8 % by chance"),
        ((300, None, 300), HOLDS, "as many seeds reach it"),  # 2 of 3 where 5 of 5 did: 38 % by chance
        ((450, 500), UNTOLD, "5 and 2 seeds are too few to tell (5 % by chance): set more seeds"),
        ((None,), UNTOLD, "5 and 1 seeds are too few to tell"),
    ],
)
def test_the_updates_to_the_target(updates, outcome, why):
    runs = [facts(seed, updates=each) for seed, each in enumerate(updates)]
    answer = answered("target", runs)
    assert (answer.outcome, why in answer.because) == (outcome, True), answer


def test_the_seconds_to_the_target_are_a_devices():
    slow = {"seconds_to_target": 7.0}
    assert answered("target", several(0.9, 0.9, 0.9, **slow))[3:] == (REFUTED, "it takes more than 2 times the seconds")
    elsewhere = answered("target", several(0.9, 0.9, 0.9, **slow, device="another"))
    assert (elsewhere.outcome, elsewhere.because[-32:]) == (HOLDS, "the seconds are another device's")


def test_the_chance_of_fewer_is_fishers():
    from scipy.stats import fisher_exact

    for reached, n, claimed, of in ((0, 3, 5, 5), (1, 3, 5, 5), (2, 5, 4, 6), (0, 1, 1, 1), (3, 3, 5, 5)):
        exact = fisher_exact([[reached, n - reached], [claimed, of - claimed]], alternative="less").pvalue
        assert chance_of_fewer(reached, n, claimed, of) == pytest.approx(exact)


# --- memory and energy ---


@pytest.mark.parametrize(
    ("kind", "field", "good", "bad"), [("memory", "peak_mib", 549.0, 551.0), ("energy", "joules", 1249.0, 1251.0)]
)
def test_memory_and_energy(kind, field, good, bad):
    assert answered(kind, several(0.9, **{field: 1.0})).outcome == HOLDS
    assert answered(kind, several(0.9, 0.9, **{field: good})).outcome == HOLDS
    assert answered(kind, several(0.9, 0.9, **{field: bad})).outcome == REFUTED
    assert answered(kind, several(0.9, **{field: None}))[3:] == (UNTOLD, "it is not measured here")
    other = answered(kind, several(0.9, **{field: bad}, device="a chip, 8 threads"))
    assert other[3:] == (UNTOLD, "another device: a chip, 8 threads, claimed on a chip, 2 threads")


def test_the_largest_memory_counts():
    runs = [facts(5, peak_mib=100.0), facts(6, peak_mib=560.0), facts(7, peak_mib=None)]
    answer = answered("memory", runs)
    assert (answer.measured, answer.outcome) == ("560 MiB at most, 2 seeds", REFUTED)


# --- all together ---


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((HOLDS, HOLDS), 0),
        ((HOLDS, UNTOLD, SKIPPED), 0),
        ((HOLDS, REFUTED, UNTOLD), 1),
        ((REFUTED,), 1),
        ((UNTOLD, UNTOLD), 4),
        ((UNTOLD, SKIPPED), 4),
    ],
)
def test_the_exit_code(outcomes, code):
    assert exit_code([Answer("quality", "", "", outcome, "") for outcome in outcomes]) == code


SPEED = Speed(2.0, (1.9, 2.1), Against({"epochs": 3}))


def claimed(claim: Claim, head: str = "epochs: 2\n") -> Path:
    file = Path("claimed.yaml")
    file.write_text(head + claim.text())
    return file


@pytest.fixture
def made_up(monkeypatch):
    """Measurements that were made up, in place of those that would be made; what was asked for."""
    asked: dict[str, Any] = {
        "runs": several(0.95, 0.945, 0.955),
        "ratio": Interval(2.0, 1.95, 2.05),
        "device": "a chip, 2 threads",
    }

    def measure(specs, settings, overrides):
        here = {"device": asked["device"], "device_type": "cpu"}
        rows = [Row("base", [], ratio=Interval(1, 1, 1), **here), Row("it", [], ratio=asked["ratio"], **here)]
        asked["variants"] = [spec.job.composed.plain["epochs"] for spec in specs]
        return Comparison(rows, [], [], settings, environment.describe([], "", {}), 1.0)

    def train(spec, claim, seeds, kinds):
        asked["trained"] = ([*seeds], [kind.key for kind in kinds])
        return asked["runs"]

    monkeypatch.setattr(comparison, "measure", measure)
    monkeypatch.setattr(verify, "train", train)
    return asked


def test_every_kind_is_answered(made_up, capsys):
    file = claimed(replace(CLAIM, speed=SPEED))
    assert main.main(["recipe", "verify", str(file), "model=mlp"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^ (\w+) .*  (holds) ", said, re.M) == [
        (kind, HOLDS) for kind in ("speed", "quality", "target", "memory", "energy")
    ]
    assert "claimed: 2.00 × (1.90 to 2.10) the samples a second of epochs=3; accuracy 0.95" in said
    assert made_up["variants"] == [3, 2]
    assert made_up["trained"] == ([5, 6, 7, 8, 9], ["quality", "target", "memory", "energy"]), "seeds that the claim did not have"


def test_one_kind_that_does_not_hold(made_up, capsys):
    made_up["runs"] = several(0.5, 0.51, 0.49)
    assert main.main(["recipe", "verify", str(claimed(CLAIM)), "seeds=3"]) == 1
    said = capsys.readouterr().out
    assert f"{REFUTED}" in next(line for line in said.splitlines() if line.startswith(" quality"))
    assert HOLDS in next(line for line in said.splitlines() if line.startswith(" memory"))
    assert "variants" not in made_up, "no speed is claimed, so none is measured"


def test_on_another_machine_with_other_data_nothing_can_be_told(made_up):
    made_up["runs"] = several(0.5, kind="cuda", device="a card", data={**DATA, "hash": "01234567"})
    made_up["device"], made_up["ratio"] = "another", Interval(1.0, 0.9, 1.1)
    found = verify.verify(recipe.read(claimed(replace(CLAIM, speed=SPEED))))
    assert {answer.outcome for answer in found.answers} == {UNTOLD}
    assert found.code == 4
    assert found.answers[0].measured == "1.00 × (0.90 to 1.10)", "it is shown all the same"
    assert found.as_dict()["answers"][0]["outcome"] == UNTOLD
    json_keys.check(
        found.as_dict(), top="recipe code answers runs", answers="kind claimed measured outcome because", runs=json_keys.FACTS
    )


def test_quick_measures_the_speed_alone(made_up, capsys):
    assert main.main(["recipe", "verify", str(claimed(replace(CLAIM, speed=SPEED))), "--quick"]) == 0
    said = capsys.readouterr().out
    assert said.count(SKIPPED) == 4
    assert "trained" not in made_up
    assert main.main(["recipe", "verify", str(claimed(CLAIM)), "--quick"]) == 2
    assert "claims no speed" in capsys.readouterr().err


def test_a_seed_of_the_users_own_is_the_first(made_up):
    verify.verify(recipe.read(claimed(CLAIM)), ["runtime.seed=77"], settings=Settings(seeds=2))
    assert made_up["trained"][0] == [77, 78]


def test_a_run_that_cannot_be_built_is_the_users_to_mend():
    """On a device like the claim's; elsewhere it may be the device's fault."""
    from drivetrain.launch.job import prepare

    run, job = Facts(0, error="failed: there is no data"), prepare(["model=mlp", "runtime.device=cpu"])
    with pytest.raises(UserError, match=r"^there is no data$"):
        verify.differences(CLAIM, run, job)
    on_card = replace(CLAIM, device=Device("cuda", "a card"))
    assert verify.differences(on_card, run, job).kind == "cpu, claimed on cuda"


# --- true runs ---


def test_what_runs_export_holds_of_others_and_what_is_made_up_does_not(command, train):
    """In one run: what three seeds measured is verified with two others, of which the first has a process of its own."""
    words = ["data=digits", "model.hidden=[16]", "optimizer.lr=0.1", "epochs=6", "updates=60", "batch.global_batch=96"]
    runs = [str(train(*words, f"runtime.seed={seed}").run_dir) for seed in (1, 2, 3)]
    assert main.main(["recipe", "export", *runs, "mine.yaml", "target=accuracy>=0.3"]) == 0
    found = recipe.read(Path("mine.yaml")).claim
    assert (found.seeds, found.data.of, found.data.samples) == ((1, 2, 3), "content", 1150)
    assert found.memory is None, "this process has done other work"
    claim = replace(found, memory=Memory(20, 1))
    Path("mine.yaml").write_text(Path("mine.yaml").read_text().partition("claim:")[0] + claim.text())
    done, _ = command("recipe", "verify", "mine.yaml", "seeds=2")
    assert done.returncode == 1, done.stdout + done.stderr
    answers = dict(re.findall(rf"^ (quality|target|memory) .*  ({HOLDS}|{REFUTED}) ", done.stdout, re.M))
    assert answers == {"quality": HOLDS, "target": HOLDS, "memory": REFUTED}, done.stdout
    assert not list(Path("outputs").glob("verify/*/*"))
