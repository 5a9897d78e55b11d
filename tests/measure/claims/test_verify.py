"""`drivetrain recipe verify`: each kind of a claim, held against runs that were made up, and once against true ones."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import main
from drivetrain.config.catalog import options
from drivetrain.config.compose import compose
from drivetrain.core.errors import UserError
from drivetrain.launch.job import checked, prepare
from drivetrain.measure.benchmark import compare
from drivetrain.measure.benchmark.compare import Comparison, Row
from drivetrain.measure.benchmark.quality import FAIL, PASS, Verdict
from drivetrain.measure.benchmark.variants import Facts, TrainedRun, VariantSpec
from drivetrain.measure.claims import export as claims
from drivetrain.measure.claims import verify
from drivetrain.measure.claims.verify import (
    ALL,
    HOLDS,
    REFUTED,
    SKIPPED,
    UNTOLD,
    Answer,
    ClaimRuns,
    Differences,
    Verified,
    VerifySettings,
    chance_of_fewer,
    judge,
)
from drivetrain.measure.intervals import Interval
from drivetrain.recipe import reader as recipe
from drivetrain.recipe.claims import Against, Claim, DataSection, DeviceSection, Energy, Memory, Quality, Speed, Target
from drivetrain.run import environment
from tests.support import json_keys

DATA = {"hash": "deadbeef0123", "of": "content", "samples": 1150}
CLAIM = Claim(
    quality=Quality("accuracy", "validation", 0.95, 5, 0.005, (0.9438, 0.9562)),
    target=Target("accuracy>=0.9", 5, 5, 300, 400, 3.0),
    memory=Memory(500, 5),
    energy=Energy(1000, 5),
    data=DataSection(**DATA),
    device=DeviceSection("cpu", "a chip, 2 threads"),
    versions={"torch": str(environment.version("torch"))},
    seeds=(0, 1, 2, 3, 4),
)
KIND = {kind.key: kind for kind in ALL}


def facts(seed: int, accuracy: float = 0.95, updates: int | None = 300, **more: Any) -> Facts:
    """A run with this seed, on the claim's machine and data."""
    figures = {"validation": {"accuracy": accuracy, "loss": 1 - accuracy}}
    given: dict[str, Any] = {
        "set": "validation", "figures": figures, "updates_to_target": updates,
        "seconds_to_target": None if updates is None else updates / 100, "reach": "accuracy>=0.9", "peak_mib": 490.0,
        "joules": 900.0, "data": DATA, "kind": "cpu", "device": "a chip, 2 threads",
    }  # fmt: skip
    return Facts(seed, **{**given, **more})


def several(*accuracies: float, **more: Any) -> list[Facts]:
    return [facts(seed, accuracy, **more) for seed, accuracy in enumerate(accuracies, 5)]


def seen(claim: Claim, runs: list[Facts], better: Any = max) -> ClaimRuns:
    """The runs, as they were seen on their own device."""
    differ = Differences.of(claim, runs[0].kind, runs[0].device, runs[0].data)
    return ClaimRuns(runs, differ, {"accuracy": better, "loss": min})


def answered(kind: str, runs: list[Facts], claim: Claim = CLAIM, better: Any = max) -> Answer:
    """The answer that the runs give on one kind of the claim."""
    return KIND[kind].answer(claim, seen(claim, runs, better))


def of_metric(mean: float, n: int, sd: float | None = None, metric: str = "accuracy", spread: float | None = None) -> Claim:
    """A claim of a metric's mean over so many seeds."""
    interval = None if spread is None else (mean - spread, mean + spread)
    return replace(CLAIM, quality=Quality(metric, "validation", mean, n, sd, interval), seeds=(0,) * n)


OF_LOSS = of_metric(0.05, 5, 0.005, "loss", 0.0062)
NO_SPREAD = of_metric(1.0, 5, 0.0, spread=0.0)
ONE_RUN = of_metric(0.95, 1)
FORGED_MEDIAN = replace(CLAIM, target=Target("accuracy>=0.9", 5, 5, 3, 400, 3.0))
CARD = {"kind": "cuda", "device": "a card"}
OTHER_DATA = {"data": {**DATA, "hash": "0123", "samples": 9}}
ENDED = "the run with seed 5 ended: "


def updates(*found: int | None) -> list[Facts]:
    """Runs that reached the target after so many updates."""
    return [facts(seed, updates=each) for seed, each in enumerate(found)]


def memory(*peaks: float | None, **more: Any) -> list[Facts]:
    return [facts(seed, peak_mib=peak, **more) for seed, peak in enumerate(peaks, 5)]


def energy(*joules: float | None, **more: Any) -> list[Facts]:
    return [facts(seed, joules=each, **more) for seed, each in enumerate(joules, 5)]


@pytest.mark.parametrize(
    ("kind", "runs", "claim", "outcome", "because"),
    [
        # The final metric is held by a t-test.
        ("quality", several(0.95, 0.945, 0.955), CLAIM, HOLDS, "t-test at 2 %"),
        ("quality", several(0.99, 0.991, 0.992), CLAIM, HOLDS, "t-test at 2 %"),  # better than claimed
        ("quality", several(0.94, 0.945, 0.943), CLAIM, HOLDS, "t-test at 2 %"),  # worse by 0.0073: chance allows 0.0092
        ("quality", several(0.938, 0.94, 0.936), CLAIM, REFUTED, "worse by 0.012"),
        ("quality", several(0.9, 0.91, 0.89), CLAIM, REFUTED, "t-test at 2 %"),
        ("quality", several(0.948), CLAIM, HOLDS, "t-test at 2 %"),  # one seed, by the claim's spread
        ("quality", several(0.8), CLAIM, REFUTED, "t-test at 2 %"),
        # What is lower is better where it is.
        ("quality", several(0.99, 0.991, 0.992), OF_LOSS, HOLDS, "not worse"),
        ("quality", several(0.9, 0.91, 0.89), OF_LOSS, REFUTED, "worse by"),
        # A loss that differs by a tenth from seed to seed, here too: chance allows a sixth of it.
        ("quality", several(0.952, 0.941, 0.947, 0.943, 0.952), OF_LOSS, HOLDS, "not worse"),
        ("quality", several(0.945, 0.945, 0.945), OF_LOSS, UNTOLD, "too few seeds"),  # worse by a tenth, with no spread here
        # Seeds without any spread may differ by half a percent, as on a CPU of another kind, which rounds otherwise.
        ("quality", several(0.9955, 0.9955), NO_SPREAD, HOLDS, "at least 0.5 %"),
        ("quality", several(0.9945, 0.9945), NO_SPREAD, REFUTED, "worse by"),
        # One run each has no spread.
        ("quality", several(0.95), ONE_RUN, UNTOLD, "one run each shows no spread: set seeds=5"),
        ("quality", several(0.95, 0.951), ONE_RUN, UNTOLD, "too few seeds: set seeds=5 (1 and 2 runs hardly show the spread)"),
        ("quality", several(0.95, 0.951, 0.949, 0.95), ONE_RUN, HOLDS, "not worse"),
        # A claim cannot allow itself what it likes, by a made-up mean with no spread or a large one.
        *(
            ("quality", several(*values), of_metric(0.999, n, sd), outcome, because)
            for n, sd in ((1, None), (3, 0.05))
            for values, outcome, because in (
                ((0.92, 0.926), UNTOLD, "too few seeds: set seeds=5"),
                ((0.92, 0.926, 0.914, 0.91, 0.93), REFUTED, "worse by"),
            )
        ),
        # Other data tell nothing; another device tells of the result all the same.
        (
            "quality", several(0.5, **OTHER_DATA), CLAIM, UNTOLD,
            "other data: 9 samples here, 1150 claimed, fingerprint 0123, claimed deadbeef",
        ),
        ("quality", several(0.5, data=None), CLAIM, UNTOLD, "other data: the data here has no fingerprint"),
        ("quality", several(0.5, data=None), replace(CLAIM, data=None), REFUTED, "worse by"),
        ("quality", several(0.95, 0.94, **CARD), CLAIM, HOLDS, "not worse"),
        ("quality", several(0.5, 0.51, **CARD), CLAIM, REFUTED, "worse by"),
        ("quality", [facts(5, figures={"test": {"accuracy": 1.0}})], CLAIM, UNTOLD, "it is not measured here"),
        ("quality", [facts(5, error="diverged: nan")], CLAIM, REFUTED, f"{ENDED}diverged: nan"),
        # The claim's device has what this one has not.
        ("quality", [facts(5, error="it needs CUDA", kind="cuda", device=None)], CLAIM, UNTOLD, f"{ENDED}it needs CUDA"),
        # The updates to the target, and the seconds, which are a device's.
        ("target", updates(300, 350, 250), CLAIM, HOLDS, "within 2 times the seconds"),
        ("target", updates(100, 100, 100), CLAIM, HOLDS, "within 2 times the seconds"),
        ("target", updates(450, 500, 390), CLAIM, HOLDS, "within 2 times the seconds"),  # one is no slower than the slowest
        (
            "target", updates(450, 500, 410), CLAIM, REFUTED,
            "every seed needs more updates than the slowest claimed one: 1.8 % by chance",
        ),
        ("target", updates(300, 350, 250), FORGED_MEDIAN, UNTOLD, "the median seed needs 100.0 times the claimed updates"),
        ("target", updates(450, 500, None), CLAIM, REFUTED, "every seed needs more updates"),
        ("target", updates(None, None, None), CLAIM, REFUTED, "fewer seeds reach it: 1.8 % by chance"),
        ("target", updates(300, None, 300), CLAIM, HOLDS, "as many seeds reach it"),  # 2 of 3 where 5 of 5 did: 38 % by chance
        ("target", updates(450, 500), CLAIM, UNTOLD, "5 and 2 seeds are too few to tell (5 % by chance): set more seeds"),
        ("target", updates(None), CLAIM, UNTOLD, "5 and 1 seeds are too few to tell"),
        ("target", several(0.9, 0.9, 0.9, seconds_to_target=7.0), CLAIM, REFUTED, "it takes more than 2 times the seconds"),
        (
            "target", several(0.9, 0.9, 0.9, seconds_to_target=7.0, device="another"), CLAIM, HOLDS,
            "the seconds are another device's",
        ),
        # Memory and energy: the largest, and the mean.
        ("memory", memory(1.0), CLAIM, HOLDS, "0.00 times the claim, 1.1 allowed"),
        ("memory", memory(549.0, 549.0), CLAIM, HOLDS, "1.10 times the claim"),
        ("memory", memory(100.0, 551.0, None), CLAIM, REFUTED, "1.10 times the claim, 1.1 allowed"),
        ("memory", memory(None), CLAIM, UNTOLD, "it is not measured here"),
        (
            "memory", memory(551.0, device="a chip, 8 threads"), CLAIM, UNTOLD,
            "another device: a chip, 8 threads, claimed on a chip, 2 threads",
        ),
        ("energy", energy(1.0), CLAIM, HOLDS, "0.00 times the claim, 1.25 allowed"),
        ("energy", energy(1249.0, 1249.0), CLAIM, HOLDS, "1.25 times the claim"),
        ("energy", energy(1251.0, 1251.0), CLAIM, REFUTED, "1.25 times the claim"),
        ("energy", energy(None), CLAIM, UNTOLD, "it is not measured here"),
        ("energy", energy(1.0, device="a chip, 8 threads"), CLAIM, UNTOLD, "another device: "),
    ],
)  # fmt: skip
def test_each_kind_is_answered_by_what_the_runs_measured(kind, runs, claim, outcome, because):
    answer = answered(kind, runs, claim)
    assert (answer.outcome, because in answer.because) == (outcome, True), answer


@pytest.mark.parametrize(
    ("kind", "runs", "measured"),
    [
        ("quality", several(0.5, **OTHER_DATA), "accuracy 0.5, validation, 1 run"),  # what was measured is shown all the same
        ("quality", [facts(5, figures={"test": {"accuracy": 1.0}})], "–"),
        ("memory", memory(100.0, 560.0, None), "560 MiB at most, 2 runs"),
    ],
)
def test_what_was_measured_is_shown(kind, runs, measured):
    assert answered(kind, runs).measured == measured


def test_of_a_metric_without_a_direction_both_sides_count():
    for accuracies in ((0.99, 0.991, 0.992), (0.9, 0.91, 0.89)):
        answer = answered("quality", several(*accuracies), better=None)
        assert (answer.outcome, answer.because.startswith("apart by")) == (REFUTED, True)
    assert answered("quality", several(0.95, 0.945, 0.955), better=None).outcome == HOLDS


def test_the_t_test_is_the_textbooks():
    """Against scipy's own two-sample test from the same statistics: it refutes on one side of the level, and not on the other."""
    from scipy.stats import ttest_ind_from_stats

    chances = []
    for mean in (0.9385, 0.9395, 0.9404, 0.9405, 0.9415, 0.9425):
        chances.append(ttest_ind_from_stats(mean, 0.005, 3, 0.95, 0.005, 5, alternative="less").pvalue)
        runs = several(mean - 0.005, mean, mean + 0.005)
        assert answered("quality", runs).outcome == (REFUTED if chances[-1] < 0.02 else HOLDS), chances
    assert 0.019 < chances[2] < 0.02 < chances[3] < 0.021


def test_the_chance_of_fewer_is_fishers():
    from scipy.stats import fisher_exact

    for reached, n, claimed, of in ((0, 3, 5, 5), (1, 3, 5, 5), (2, 5, 4, 6), (0, 1, 1, 1), (3, 3, 5, 5)):
        exact = fisher_exact([[reached, n - reached], [claimed, of - claimed]], alternative="less").pvalue
        assert chance_of_fewer(reached, n, claimed, of) == pytest.approx(exact)


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
    answers = [Answer("quality", "", "", outcome, "") for outcome in outcomes]
    assert Verified(None, answers, None, None, []).code == code


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
        return seen(claim, asked["runs"])

    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(verify, "train", train)
    return asked


def test_every_kind_is_answered(made_up, says):
    file = claimed(replace(CLAIM, speed=SPEED))
    said = says("recipe", "verify", file, "model=mlp")
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


def test_quick_measures_the_speed_alone(made_up, says, refused):
    assert says("recipe", "verify", claimed(replace(CLAIM, speed=SPEED)), "--quick").count(SKIPPED) == 4
    assert "trained" not in made_up
    assert "claims no speed" in refused("recipe", "verify", claimed(CLAIM), "--quick")


def test_a_seed_of_the_users_own_is_the_first(made_up):
    verify.verify(recipe.read(claimed(CLAIM)), ["runtime.seed=77"], settings=VerifySettings(seeds=2))
    assert made_up["trained"][0] == [77, 78]


@pytest.fixture
def trained(monkeypatch):
    """Train a recipe on a CPU, of whose runs this is what each leaves; the seeds that were trained, and which alone."""
    asked = []

    def of(claim: Claim, **left: Any) -> ClaimRuns:
        @contextmanager
        def trainings(*_: Any, **named: Any) -> Iterator[Any]:
            def run(spec: VariantSpec, seed: int, alone: bool, fold: int | None) -> TrainedRun:
                asked.append((seed, alone) if fold is None else (seed, fold))
                return TrainedRun(seed, 0, facts=facts(seed, **left))

            yield run

        monkeypatch.setattr(verify, "trainings", trainings)
        spec = VariantSpec("it", [], prepare(["model=mlp", "runtime.device=cpu"]))
        return verify.train(spec, claim, range(5, 8), [KIND[key] for key in claim.kinds()])

    of.asked = asked
    return of


def test_a_run_that_cannot_be_built_is_the_users_to_mend(trained):
    """On a device like the claim's; elsewhere it may be the device's fault."""
    missing = {"error": "failed: there is no data", "kind": None, "device": None, "data": None}
    with pytest.raises(UserError, match=r"^there is no data$"):
        trained(CLAIM, **missing)
    on_card = replace(CLAIM, device=DeviceSection("cuda", "a card"))
    assert trained(on_card, **missing).differ.kind == "cpu, claimed on cuda"


def test_one_seed_is_trained_where_it_fails_or_nothing_can_be_told_and_the_first_alone_for_its_memory(trained):
    assert [run.seed for run in trained(CLAIM).runs] == [5, 6, 7]
    assert trained.asked == [(5, True), (6, False), (7, False)]
    assert len(trained(CLAIM, error="diverged: nan").runs) == len(trained(CLAIM, **OTHER_DATA).runs) == 1
    trained.asked.clear()
    trained(replace(CLAIM, memory=None))
    assert trained.asked[0] == (5, False)
    trained.asked.clear()
    trained(replace(CLAIM, folds=2))
    assert trained.asked == [(seed, fold) for seed in (5, 6, 7) for fold in (0, 1)]


# --- true runs ---


def test_what_runs_export_holds_of_others_and_what_is_made_up_does_not(command, train):
    """In one run: what three seeds measured is verified with two others, of which the first has a process of its own."""
    words = ["data=digits", "model.hidden=[16]", "optimizer.lr=0.1", "epochs=6", "updates=60", "batch.global_batch=96"]
    runs = [str(train(*words, f"runtime.seed={seed}").run_dir) for seed in (1, 2, 3)]
    assert main.main(["recipe", "export", *runs, "mine.yaml", "target=accuracy>=0.3"]) == 0
    found = recipe.read(Path("mine.yaml")).claim
    assert (found.seeds, found.data.of, found.data.samples) == ((1, 2, 3), "content", 1150)
    assert found.memory is None, "this process has done other work"
    claim = replace(found, memory=Memory(20, 1), target=replace(found.target, seconds=None))  # which other programs make longer
    Path("mine.yaml").write_text(Path("mine.yaml").read_text().partition("claim:")[0] + claim.text())
    done, _ = command("recipe", "verify", "mine.yaml", "seeds=2", code=1)
    answers = dict(re.findall(rf"^ (quality|target|memory) .*  ({HOLDS}|{REFUTED}) ", done.stdout, re.M))
    assert answers == {"quality": HOLDS, "target": HOLDS, "memory": REFUTED}, done.stdout
    assert not list(Path("outputs").glob("verify/*/*"))


# --- A recipe's claim of speed: made of what was measured, and judged when it is measured again ---


OF_SPEED = {"ratio": "1.91", "interval": "[1.85, 1.97]", "against": "{precision: fp32, surgery: []}", "quality": "PASS"}
HEAD = "defaults:\n  - override /precision: bf16\n  - override /surgery: [channels_last]\n"


def written(given: dict[str, str] | None = None, head: str = HEAD, device: str = "a chip, 2 threads") -> Path:
    """A recipe file with this claim of speed."""
    file = Path("claimed.yaml")
    parts = "".join(f"    {key}: {value}\n" for key, value in (OF_SPEED if given is None else given).items())
    where = f"  device: {{kind: cpu, name: '{device}'}}\n  versions: {{torch: 2.15.0}}\n"
    file.write_text(f"{head}claim:\n{where}  speed:\n{parts}")
    return file


# --- reading ---


def test_a_claim_is_no_part_of_the_config():
    file = written()
    Path("plain.yaml").write_text(HEAD)
    with_claim, without = prepare([f"recipe={file}"]), prepare(["recipe=plain.yaml"])
    assert with_claim.config_hash == without.config_hash
    assert with_claim.composed.plain == {**without.composed.plain, "recipe": with_claim.composed.plain["recipe"]}


def test_a_run_does_not_copy_it(tmp_path):
    prepare([f"recipe={written()}", "surgery=[]"]).write_files(tmp_path)
    text = (tmp_path / "recipe.yaml").read_text()
    assert ("override /precision: bf16" in text, "claim" in text) == (True, False)


@pytest.mark.parametrize(
    ("against", "told"),
    [
        ("{precision: fp33}", "claimed.yaml:10: precision=fp33 is no option of precision"),
        ("{runtime.device: cpu}", "claimed.yaml:10: a recipe cannot set 'runtime.device'"),
        ("{model: own}", "claimed.yaml:10: a recipe cannot choose 'model=own'"),
        ("{optimizer.lrr: 1}", "claimed.yaml:10: optimizer=adamw has no 'lrr'"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "verify"])
def test_the_baseline_is_a_strangers_too(verb, against, told, refused):
    assert told in refused("recipe", verb, written({**OF_SPEED, "against": against}))


def test_what_the_claim_is_about_is_not_set_beside_it(refused):
    said = refused("recipe", "verify", written(), "precision=bf16", "surgery=[]")
    assert said.count("is what the claim is about (precision=fp32 surgery=[])") == 2


# --- making ---


def row(ratio=(1.91, 1.85, 1.97), device="a chip, 2 threads", **more) -> Row:
    return Row("it", [], ratio=Interval(*ratio), device=device, device_type="cpu", samples_per_second=1910.0, **more)


@pytest.mark.parametrize(
    ("words", "base"),
    [
        (["precision=bf16"], []),
        (["optimizer.lr=0.1"], []),
        ([], ["optimizer.lr=0.1", "epochs=3"]),
        (["optimizer=sgd", "optimizer.lr=0.2"], ["optimizer.lr=0.01"]),
        (["optimizer=sgd", "optimizer.lr=0.2"], ["optimizer=sgd", "optimizer.nesterov=false"]),
        (["surgery=[channels_last]", "batch=accumulate", "batch.accumulation_steps=2"], ["batch.global_batch=64"]),
        (["batch=accumulate", "batch.accumulation_steps=2", "batch.global_batch=64"], ["batch.global_batch=64"]),
        (["model=timm", "model.kwargs={drop_rate: 0.1}"], ["model=timm"]),
        (["model=timm"], ["model=timm", "model.kwargs={drop_rate: 0.1}"]),
        (["recipe=fast", "saving=none"], ["recipe=naive", "saving=none"]),
        (["recipe=naive", "augment=[flip_crop]", "augment.flip_crop.pad=1"], ["recipe=naive", "augment=[cutmix]"]),
        (["augment=[flip_crop]"], ["augment=[flip_crop]", "augment.flip_crop.pad=1"]),
    ],
)
def test_a_recipe_and_its_claim_bring_both_configs_back(words, base):
    """Read as a stranger's, the recipe is the one that was measured, and its baseline is the other."""
    job, before = prepare(words), prepare(base)
    file = Path("made.yaml")
    claims.write(file, "tune", "it", "the\nother", job, before, row(), row(), ["a\nnote"])
    evidence = (
        "# drivetrain tune: it has 1.91 × (1.85 to 1.97) the samples a second of the other, measured in interleaved rounds\n"
    )
    assert file.read_text().startswith(f"{evidence}# a note\n# 1,910 samples a second, the baseline 1,910\n")
    found = recipe.read(file)
    assert found.claim is not None
    kept = [word for word in words if word == "saving=none"]  # what measuring set is no part of the recipe
    assert checked(compose(kept, base=found)).config_hash == job.config_hash
    assert checked(compose(kept, base=found.baseline(options()))).config_hash == before.config_hash
    assert ("saving" in found.choices) != bool(kept)


def test_what_no_recipe_may_hold_is_not_claimed():
    job, before = prepare(["runtime.threads=2", "precision=bf16"]), prepare(["runtime.threads=1"])
    claims.write(Path("made.yaml"), "tune", "it", "the other", job, before, row(), row())
    text = Path("made.yaml").read_text()
    assert "# no claim: the baseline differs in runtime.threads" in text
    assert "claim:" not in text.replace("no claim:", "")


@pytest.mark.parametrize("ratio", [None, Interval(1.9, 0.0, math.inf)])
def test_no_interval_no_claim(ratio):
    assert claims.claim_of(replace(row(), ratio=ratio), {"precision": "fp32"}) is None


def test_a_claim_has_the_measurements_own_facts():
    made = claims.claim_of(row(verdict=Verdict(PASS, "", "accuracy")), {"precision": "fp32"})
    assert (made.speed.ratio, made.speed.interval, made.speed.quality) == (1.91, (1.85, 1.97), "PASS")
    assert made.device == DeviceSection("cpu", "a chip, 2 threads")
    assert made.versions["torch"] == environment.version("torch")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made.measured)
    assert list(made.kinds()) == ["speed"]
    assert not list(made.problems("claim"))


def test_the_runs_of_a_verdict_are_claimed_too():
    """Those of the variant itself: what they end with, and when they reached the target; not the memory of forked processes."""
    data = {"hash": "deadbeef", "of": "content", "samples": 48}
    facts = [
        Facts(seed, "validation", {"validation": {"accuracy": value}}, 1.5, 40, "accuracy>=0.5", data=data)
        for seed, value in ((0, 0.7), (1, 0.8))
    ]
    runs = [TrainedRun(each.seed, 96, facts=each) for each in facts]
    made = claims.claim_of(row(verdict=Verdict(PASS, "", "accuracy", runs)), {"precision": "fp32"})
    assert list(made.kinds()) == ["speed", "quality", "target"]
    assert (made.quality.mean, made.quality.set, made.seeds) == (0.75, "validation", (0, 1))
    assert str(made.target) == "accuracy>=0.5 after 40 updates, 1.5 s, 2 of 2 runs"
    assert made.data == DataSection(**data)
    runs[1].facts.error = "diverged"
    assert list(claims.claim_of(row(verdict=Verdict(FAIL, "", "accuracy", runs)), {"precision": "fp32"}).kinds()) == ["speed"]


# --- judging ---

TORCH = {"torch": str(environment.version("torch"))}
SPEED_CLAIM = Claim(
    speed=Speed(1.91, (1.85, 1.97), Against({"precision": "fp32"})),
    device=DeviceSection("cpu", "a chip, 2 threads"),
    versions=TORCH,
)
GPU = replace(SPEED_CLAIM, device=DeviceSection("cuda", "a card"))
OLD = replace(SPEED_CLAIM, versions={"torch": "1.13.1", "nothing": "9"})
SLOWER = replace(SPEED_CLAIM, speed=Speed(0.7, (0.65, 0.75), Against({"precision": "fp32"})))
FORGED = replace(SPEED_CLAIM, speed=Speed(50.0, (0.9, 60.0), Against({"precision": "fp32"})))
WITH_QUALITY = replace(SPEED_CLAIM, speed=replace(SPEED_CLAIM.speed, quality="PASS"))
FAILED_QUALITY = Verdict(FAIL, "accuracy worse by 0.5", "accuracy")
ENDS = replace(row(), error="out of memory", ratio=None)


@pytest.mark.parametrize(
    ("claim", "measured", "outcome", "said"),
    [
        (SPEED_CLAIM, row(), HOLDS, "measured 1.91 × (1.85 to 1.97), claimed 1.91 × (1.85 to 1.97)"),
        (SPEED_CLAIM, row((3.0, 2.5, 3.5)), HOLDS, "measured 3.00"),
        (SPEED_CLAIM, row((1.7, 1.6, 1.76)), HOLDS, "measured 1.70"),  # 5 % below the lower bound
        (SPEED_CLAIM, row((1.7, 1.6, 1.75)), REFUTED, "slower than claimed: measured 1.70"),
        (SPEED_CLAIM, row((1.5, 0.9, 2.5)), REFUTED, "not faster, the interval includes 1: measured 1.50"),
        (FORGED, row((1.1, 1.05, 1.15)), UNTOLD, "the claimed interval is too wide to tell: measured 1.10"),
        (SLOWER, row((0.7, 0.66, 0.73)), HOLDS, "measured 0.70"),  # what saves memory may cost time, and says so
        (SLOWER, row((0.5, 0.45, 0.55)), REFUTED, "slower than claimed: measured 0.50"),
        (SPEED_CLAIM, row(device="another"), UNTOLD, "other hardware (another, claimed on a chip, 2 threads): measured 1.91"),
        (SPEED_CLAIM, row((1.0, 0.9, 1.1), "another"), UNTOLD, "not faster here: other hardware (another, claimed on a chip"),
        (OLD, row((1.0, 0.9, 1.2)), UNTOLD, "not faster here: other hardware (torch "),
        (GPU, row(device="a card"), UNTOLD, "other hardware (cpu, claimed on cuda): measured"),
        (WITH_QUALITY, row(), HOLDS, "quality PASS claimed: quality=true checks it again"),
        (WITH_QUALITY, row(verdict=Verdict(PASS, "", "accuracy")), HOLDS, "(1.85 to 1.97); quality PASS"),
        (SPEED_CLAIM, row(verdict=FAILED_QUALITY), REFUTED, "accuracy worse by 0.5: measured"),
        (SPEED_CLAIM, ENDS, REFUTED, "it ended: out of memory"),
        (GPU, ENDS, UNTOLD, "it ended: out of memory"),  # as where the device has not what the recipe wants
    ],
)
def test_the_judgement(claim, measured, outcome, said):
    answer = judge(claim, row((1, 1, 1)), measured)
    assert (answer.kind, answer.outcome, said in answer.because) == ("speed", outcome, True), answer


def test_a_baseline_that_fails_is_told():
    answer = judge(SPEED_CLAIM, replace(row(), error="gone"), row())
    assert (answer.outcome, answer.because) == (REFUTED, "its baseline ended: gone")


# --- the command ---

SLOW_SET = ["data=own", "data.target=slow_set.Slow", "trust=[slow_set]", "rounds=6", "block_s=0.02"]
PAUSE = {"ratio": "2", "interval": "[1.5, 2.5]", "against": "{data.kwargs.pause: 0.01}"}


def here() -> str:
    """This machine as a claim of a run here has it, with the number of threads that such a run takes."""
    threads = prepare([]).run.runtime.thread_count(1)
    return f"{environment.processor()}, {threads} thread{'s' if threads > 1 else ''}"


@pytest.mark.slow
def test_a_claim_on_a_planted_cost_holds(command, tiny, tmp_path, slow_set):
    """The user's own data comes by words; the baseline is the one that waits."""
    file = written(PAUSE, head="", device=here())
    _, found = command("recipe", "verify", str(file), *tiny(*SLOW_SET))
    assert found["notes"][-1].startswith("holds: measured ")
    assert [row["label"] for row in found["rows"]] == ["data.kwargs.pause=0.01", "claimed"]
    assert "data.kwargs.pause=0.01" in found["rows"][0]["overrides"]
    assert found["rows"][0]["device"] == here()
    page = next(Path("outputs/compare").rglob("compare.html")).read_text()
    assert "drivetrain recipe verify claimed.yaml" in page
    assert "holds: measured" in page


# --- `--recipe FILE` of compare, ablate, tune and doctor: what was measured becomes a recipe with its claim ---

WORDS = {"precision=fp32": ["precision=fp32"], "precision=bf16": ["precision=bf16"], "optimizer=sgd": ["optimizer=sgd"]}


def compared(**ratios: tuple[float, float, float] | None) -> tuple[Comparison, list[VariantSpec]]:
    """Three variants, of which the others have these ratios."""
    given = [(1.0, 1.0, 1.0), ratios["bf16"], ratios["sgd"]]
    rows = [
        Row(label, [], ratio=Interval(*ratio) if ratio else None, device="a chip", device_type="cpu")
        for label, ratio in zip(WORDS, given, strict=True)
    ]
    specs = [VariantSpec(label, words, prepare(["model=mlp", *words])) for label, words in WORDS.items()]
    return Comparison(rows, [], [], compare.CompareSettings(), {}, 1.0), specs


def hand_on(done: Comparison, specs: list[VariantSpec], last: bool = False) -> Path:
    file = Path("mine.yaml")
    file.unlink(missing_ok=True)
    claims.hand_on("compare", file, done, specs, [2] if last else [1, 2])
    return file


def test_the_fastest_variant_is_handed_on(capsys):
    """Of an ablation it is the whole recipe, the last one."""
    done, specs = compared(bf16=(1.5, 1.4, 1.6), sgd=(1.2, 1.1, 1.3))
    assert recipe.read(hand_on(done, specs, last=True)).choices["optimizer"] == "sgd"
    found = recipe.read(hand_on(done, specs))
    assert found.choices["precision"] == "bf16"
    assert found.claim.speed.against == {"precision": "fp32"}
    assert (found.claim.speed.ratio, found.claim.device.name) == (1.5, "a chip")
    assert "# drivetrain compare: precision=bf16 has 1.50 × (1.40 to 1.60)" in Path("mine.yaml").read_text()
    assert "drivetrain recipe verify mine.yaml" in capsys.readouterr().out
    done.rows[1].verdict, done.rows[2].verdict = Verdict(FAIL, "worse", "accuracy"), Verdict(PASS, "", "accuracy")
    found = recipe.read(hand_on(done, specs))
    assert found.choices["optimizer"] == "sgd", "what made the result worse is not handed on"
    assert found.claim.speed.quality == PASS


@pytest.mark.parametrize("ratio", [None, (1.5, 0.0, float("inf")), (1.05, 0.95, 1.15), (0.5, 0.4, 0.6)])
def test_without_proof_nothing_is_written(ratio, capsys):
    assert not hand_on(*compared(bf16=ratio, sgd=None)).exists()
    assert "mine.yaml is not written: no variant is faster than the first beyond doubt" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "precision=fp32,bf16"),
        ("ablate", "recipe=fast"),
        ("doctor",),
        ("tune",),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(words, refused):
    Path("there.yaml").touch()
    for file, told in (("there.yaml", "is there already"), ("a.txt", "ends in .yaml"), ("no/a.yaml", "there is no folder no")):
        assert told in refused(*words, "--recipe", file)
