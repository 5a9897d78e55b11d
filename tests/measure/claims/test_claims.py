"""A recipe's claim of speed: made of what was measured, and judged when it is measured again."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.config.catalog import options
from drivetrain.config.compose import compose
from drivetrain.launch.job import checked, prepare
from drivetrain.measure.benchmark.compare import Comparison, Row, Settings
from drivetrain.measure.benchmark.quality import FAIL, PASS, Verdict
from drivetrain.measure.benchmark.variants import Facts, TrainedRun, VariantSpec
from drivetrain.measure.claims import export as claims
from drivetrain.measure.claims.verify import HOLDS, REFUTED, UNTOLD, judge
from drivetrain.measure.intervals import Interval
from drivetrain.recipe import reader as recipe
from drivetrain.recipe.claim import Against, Claim, Data, Device, Speed
from drivetrain.run import environment

SPEED = {"ratio": "1.91", "interval": "[1.85, 1.97]", "against": "{precision: fp32, surgery: []}", "quality": "PASS"}
HEAD = "defaults:\n  - override /precision: bf16\n  - override /surgery: [channels_last]\n"


def written(given: dict[str, str] | None = None, head: str = HEAD, device: str = "a chip, 2 threads") -> Path:
    """A recipe file with this claim of speed."""
    file = Path("claimed.yaml")
    parts = "".join(f"    {key}: {value}\n" for key, value in (SPEED if given is None else given).items())
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


def test_a_run_does_not_copy_it(train):
    run_dir = train(f"recipe={written()}", "surgery=[]").run_dir
    assert "override /precision: bf16" in (run_dir / "recipe.yaml").read_text()
    assert "claim" not in (run_dir / "recipe.yaml").read_text()


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
def test_the_baseline_is_a_strangers_too(verb, against, told, capsys):
    written({**SPEED, "against": against})
    assert main.main(["recipe", verb, "claimed.yaml"]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert "good" not in said.out
    assert not Path("outputs").exists()


def test_what_the_claim_is_about_is_not_set_beside_it(capsys):
    written()
    assert main.main(["recipe", "verify", "claimed.yaml", "precision=bf16", "surgery=[]"]) == 2
    said = capsys.readouterr().err
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
    assert made.device == Device("cpu", "a chip, 2 threads")
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
    assert str(made.target) == "accuracy>=0.5 after 40 updates, 1.5 s, 2 of 2 seeds"
    assert made.data == Data(**data)
    runs[1].facts.error = "diverged"
    assert list(claims.claim_of(row(verdict=Verdict(FAIL, "", "accuracy", runs)), {"precision": "fp32"}).kinds()) == ["speed"]


# --- judging ---

TORCH = {"torch": str(environment.version("torch"))}
CLAIM = Claim(
    speed=Speed(1.91, (1.85, 1.97), Against({"precision": "fp32"})), device=Device("cpu", "a chip, 2 threads"), versions=TORCH
)
GPU = replace(CLAIM, device=Device("cuda", "a card"))
OLD = replace(CLAIM, versions={"torch": "1.13.1", "nothing": "9"})
SLOWER = replace(CLAIM, speed=Speed(0.7, (0.65, 0.75), Against({"precision": "fp32"})))
WITH_QUALITY = replace(CLAIM, speed=replace(CLAIM.speed, quality="PASS"))
FAILED_QUALITY = Verdict(FAIL, "accuracy worse by 0.5", "accuracy")
ENDED = replace(row(), error="out of memory", ratio=None)


@pytest.mark.parametrize(
    ("claim", "measured", "outcome", "said"),
    [
        (CLAIM, row(), HOLDS, "measured 1.91 × (1.85 to 1.97), claimed 1.91 × (1.85 to 1.97)"),
        (CLAIM, row((3.0, 2.5, 3.5)), HOLDS, "measured 3.00"),
        (CLAIM, row((1.7, 1.6, 1.76)), HOLDS, "measured 1.70"),  # 5 % below the lower bound
        (CLAIM, row((1.7, 1.6, 1.75)), REFUTED, "slower than claimed: measured 1.70"),
        (CLAIM, row((1.5, 0.9, 2.5)), REFUTED, "not faster, the interval includes 1: measured 1.50"),
        (SLOWER, row((0.7, 0.66, 0.73)), HOLDS, "measured 0.70"),  # what saves memory may cost time, and says so
        (SLOWER, row((0.5, 0.45, 0.55)), REFUTED, "slower than claimed: measured 0.50"),
        (CLAIM, row(device="another"), UNTOLD, "other hardware (another, claimed on a chip, 2 threads): measured 1.91"),
        (CLAIM, row((1.0, 0.9, 1.1), "another"), UNTOLD, "not faster here: other hardware (another, claimed on a chip"),
        (OLD, row((1.0, 0.9, 1.2)), UNTOLD, "not faster here: other hardware (torch "),
        (GPU, row(device="a card"), UNTOLD, "other hardware (cpu, claimed on cuda): measured"),
        (WITH_QUALITY, row(), HOLDS, "quality PASS claimed: quality=true checks it again"),
        (WITH_QUALITY, row(verdict=Verdict(PASS, "", "accuracy")), HOLDS, "(1.85 to 1.97); quality PASS"),
        (CLAIM, row(verdict=FAILED_QUALITY), REFUTED, "accuracy worse by 0.5: measured"),
        (CLAIM, ENDED, REFUTED, "it ended: out of memory"),
        (GPU, ENDED, UNTOLD, "it ended: out of memory"),  # as where the device has not what the recipe wants
    ],
)
def test_the_judgement(claim, measured, outcome, said):
    answer = judge(claim, row((1, 1, 1)), measured)
    assert (answer.kind, answer.outcome, said in answer.because) == ("speed", outcome, True), answer


def test_a_baseline_that_fails_is_told():
    answer = judge(CLAIM, replace(row(), error="gone"), row())
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
    done, found = command("recipe", "verify", str(file), *tiny(*SLOW_SET))
    assert done.returncode == 0, done.stdout + done.stderr
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
    return Comparison(rows, [], [], Settings(), {}, 1.0), specs


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
    file = hand_on(*compared(bf16=ratio, sgd=None))
    assert not file.exists()
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
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(words, capsys):
    Path("there.yaml").touch()
    for file, told in (("there.yaml", "is there already"), ("a.txt", "ends in .yaml"), ("no/a.yaml", "there is no folder no")):
        assert main.main([*words, "--recipe", file]) == 2
        assert told in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("ablate", "tables=[alone]"), "tables= must have steps"),
        (("doctor", "prove=false"), "prove=false measures nothing"),
    ],
)
def test_what_measures_nothing_hands_nothing_on(words, told, capsys):
    assert main.main([*words, "--recipe", "mine.yaml"]) == 2
    assert told in capsys.readouterr().err
