"""A recipe's claim: read as a stranger's, made of what was measured, and judged when it is re-run."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.config import validate as check
from drivetrain.config.catalog import options
from drivetrain.config.compose import compose
from drivetrain.core.cpus import usable_cores
from drivetrain.core.errors import UserError
from drivetrain.launch.job import checked, prepare
from drivetrain.measure.benchmark.comparison import Row
from drivetrain.measure.benchmark.noninferiority import FAIL, PASS, Verdict
from drivetrain.measure.claims import write as claims
from drivetrain.measure.claims.verify import judge
from drivetrain.measure.intervals import Interval
from drivetrain.recipe import places
from drivetrain.recipe import reader as recipe
from drivetrain.run import environment

GOOD = {
    "ratio": "1.91", "interval": "[1.85, 1.97]", "device": "a chip, 2 threads", "versions": "{torch: 2.15.0}",
    "against": "{precision: fp32, surgery: []}", "measured": '"2026-11-21"', "quality": "PASS",
}  # fmt: skip
HEAD = "defaults:\n  - override /precision: bf16\n  - override /surgery: [channels_last]\n"


def written(given: dict[str, str] | None = None, head: str = HEAD) -> Path:
    """A recipe file with this claim."""
    file = Path("claimed.yaml")
    parts = GOOD if given is None else given
    file.write_text(head + "claim:\n" + "".join(f"  {key}: {value}\n" for key, value in parts.items()))
    return file


def problems_of(file: Path) -> list[str]:
    with pytest.raises(UserError) as refused:
        recipe.read(file)
    return refused.value.problems


# --- reading ---


def test_a_claim_is_read_and_is_no_part_of_the_config():
    found = recipe.read(written())
    assert found.claim == claims.Claim(
        1.91, (1.85, 1.97), "a chip, 2 threads", {"torch": "2.15.0"}, {"precision": "fp32", "surgery": []}, "2026-11-21", "PASS"
    )
    Path("plain.yaml").write_text(HEAD)
    with_claim, without = prepare(["recipe=claimed.yaml"]), prepare(["recipe=plain.yaml"])
    assert with_claim.config_hash == without.config_hash
    assert with_claim.composed.plain == {**without.composed.plain, "recipe": with_claim.composed.plain["recipe"]}


def test_a_run_does_not_copy_it(train):
    run_dir = train(f"recipe={written()}", "surgery=[]").run_dir
    assert "override /precision: bf16" in (run_dir / "recipe.yaml").read_text()
    assert "claim" not in (run_dir / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("ratio", "0", "above 0"),
        ("ratio", ".inf", "above 0"),
        ("ratio", ".nan", "above 0"),
        ("ratio", "true", "above 0"),
        ("ratio", "null", "above 0"),
        ("ratio", "'2'", "above 0"),
        ("ratio", "9" * 400, "above 0"),
        ("ratio", "2.5", "outside claim.interval"),
        ("interval", "[1.97, 1.85]", "[low, high]"),
        ("interval", "[1.9]", "[low, high]"),
        ("interval", "1.9", "[low, high]"),
        ("device", "[a]", "a text"),
        ("device", '"\\e[2J"', "a text"),
        ("device", '"a\\nb"', "a text"),
        ("device", "x" * 300, "at most 200"),
        ("versions", "{torch: 2.15}", "quote what YAML reads as a number"),
        ("versions", "2.15.0", "name → text"),
        ("against", "{}", "must be a mapping"),
        ("against", "fp32", "must be a mapping"),
        ("against", "{trust: [posix]}", "a recipe cannot set 'trust'"),
        ("against", "{hydra.run.dir: x}", "a recipe cannot set"),
        ("against", "{model._target_: posix.system}", "never a target"),
        ("against", "{optimizer.lr: '${oc.env:HOME}'}", "never to the environment"),
        ("measured", "2026-11-21", "quote it"),
        ("quality", "PASSED", "one of PASS, FAIL, INCONCLUSIVE"),
        ("mesured", "x", "did you mean 'measured'?"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(key, value, told):
    file = written({**GOOD, key: value})
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if text.startswith(f"  {key}: "))
    (problem,) = problems_of(file)
    assert told in problem
    assert problem.startswith(f"{file}:{4 if 'outside' in told else line}: ")
    assert problem.isprintable()


def test_all_that_is_wrong_is_told_at_once():
    file = written({"ratio": "-1", "intervall": "[1, 2]", "device": "1", "against": "{trust: [a], logger: [b], precision: fp32}"})
    told = " ".join(problems_of(file))
    for part in ("claim.ratio=-1", "'interval'?", "claim.device=1", "'trust'", "'logger'", "no interval", "no versions"):
        assert part in told
    assert "must be a mapping of ratio" in problems_of(written({}, HEAD + "claim: 2\n#"))[0]


def test_a_sweep_claims_nothing():
    assert "a recipe with sweep: cannot have claim:" in problems_of(written(head="sweep:\n  precision: [fp32, bf16]\n"))[0]


@pytest.mark.parametrize(
    ("against", "told"),
    [
        ("{precision: fp33}", "claimed.yaml:9: precision=fp33 is no option of precision"),
        ("{runtime.device: cpu}", "claimed.yaml:9: a recipe cannot set 'runtime.device'"),
        ("{model: own}", "claimed.yaml:9: a recipe cannot choose 'model=own'"),
        ("{optimizer.lrr: 1}", "claimed.yaml:9: optimizer=adamw has no 'lrr'"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "verify"])
def test_the_baseline_is_a_strangers_too(verb, against, told, capsys):
    written({**GOOD, "against": against})
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
    return Row("it", [], ratio=Interval(*ratio), device=device, samples_per_second=1910.0, **more)


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
    """What is written, read as a stranger's: the recipe is the one that was measured, and its baseline the other."""
    job, before = prepare(words), prepare(base)
    file = Path("made.yaml")
    file.write_text(claims.recipe_text(job, claims.against(job, before), row(), row(), ["proven\nsomehow"]))
    assert file.read_text().startswith("# proven somehow\n# 1,910 samples a second, the baseline 1,910\n")
    found = recipe.read(file)
    assert found.claim is not None
    kept = [word for word in words if word == "saving=none"]  # what measuring set is no part of the recipe
    assert checked(compose(kept, base=found)).config_hash == job.config_hash
    assert checked(compose(kept, base=found.baseline(options()))).config_hash == before.config_hash
    assert ("saving" in found.choices) != bool(kept)


def test_a_claim_is_written_as_it_is_read():
    file = written()
    claim = recipe.read(file).claim
    file.write_text(HEAD + claims.to_yaml(claim))
    assert recipe.read(file).claim == claim
    assert re.search(r"ratio: 1\.91 +# samples a second", file.read_text())
    odd = replace(
        claim, device='quo"te: #1', versions={"torch": "2.15"}, against={"optimizer.eps": 1e-8, "optimizer.betas": [0.9]}
    )
    file.write_text(claims.to_yaml(odd))
    assert recipe.read(file).claim == odd


def test_what_no_recipe_may_hold_is_not_claimed():
    job, before = prepare(["runtime.threads=2", "precision=bf16"]), prepare(["runtime.threads=1"])
    text = claims.recipe_text(job, claims.against(job, before), row())
    assert "# no claim: the baseline differs in runtime.threads" in text
    assert "claim:" not in text.replace("no claim:", "")


@pytest.mark.parametrize("ratio", [None, Interval(1.9, 0.0, math.inf)])
def test_no_interval_no_claim(ratio):
    assert claims.claim_of(replace(row(), ratio=ratio), {"precision": "fp32"}) is None


def test_a_claim_has_the_measurements_own_facts():
    made = claims.claim_of(row(verdict=Verdict(PASS, "", "accuracy")), {"precision": "fp32"})
    assert (made.ratio, made.interval, made.device, made.quality) == (1.91, (1.85, 1.97), "a chip, 2 threads", "PASS")
    assert made.versions["torch"] == environment.version("torch")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made.measured)


# --- judging ---

TORCH = {"torch": str(environment.version("torch"))}
CLAIM = claims.Claim(1.91, (1.85, 1.97), "a chip, 2 threads", TORCH, {"precision": "fp32"})
FAILED_QUALITY = Verdict(FAIL, "accuracy worse by 0.5", "accuracy")


@pytest.mark.parametrize(
    ("claim", "measured", "code", "said"),
    [
        (CLAIM, row(), 0, "holds: measured 1.91 × (1.85 to 1.97), claimed 1.91 × (1.85 to 1.97)"),
        (CLAIM, row((3.0, 2.5, 3.5)), 0, "holds: measured 3.00"),
        (CLAIM, row((1.7, 1.6, 1.76)), 0, "holds: measured 1.70"),  # 5 % below the lower bound
        (CLAIM, row((1.7, 1.6, 1.75)), 1, "does not hold: faster, but by less than claimed: measured 1.70"),
        (CLAIM, row((1.5, 0.9, 2.5)), 1, "does not hold: not faster, the interval includes 1: measured 1.50"),
        (CLAIM, row(device="another"), 0, "holds here too, on other hardware (another, claimed on a chip, 2 threads): measured"),
        (CLAIM, row((1.1, 1.05, 1.2), "another"), 0, "holds here too"),
        (CLAIM, row((1.0, 0.9, 1.1), "another"), 1, "other hardware (another, claimed on a chip, 2 threads): not faster here"),
        (replace(CLAIM, versions={"torch": "1.13.1"}), row((1.1, 1.05, 1.2)), 0, "holds here too, on other hardware (torch "),
        (replace(CLAIM, versions={"torch": "1.13.1", "nothing": "9"}), row((1.0, 0.9, 1.2)), 1, "other hardware (torch "),
        (replace(CLAIM, quality="PASS"), row(), 0, "quality PASS claimed: quality=true checks it again"),
        (replace(CLAIM, quality="PASS"), row(verdict=Verdict(PASS, "", "accuracy")), 0, "(1.85 to 1.97); quality PASS"),
        (CLAIM, row(verdict=FAILED_QUALITY), 1, "does not hold: accuracy worse by 0.5: measured"),
        (CLAIM, replace(row(), error="out of memory", ratio=None), 1, "does not hold: it ended: out of memory"),
    ],
)
def test_the_judgement(claim, measured, code, said):
    got, told = judge(claim, row((1, 1, 1)), measured)
    assert (got, said in told) == (code, True), told


def test_a_baseline_that_fails_is_told():
    assert judge(CLAIM, replace(row(), error="gone"), row()) == (1, "does not hold: its baseline ended: gone")


# --- the command ---

SLOW_SET = ["data=own", "data.target=slow_set.Slow", "trust=[slow_set]", "rounds=6", "block_s=0.02"]
PAUSE = {**GOOD, "ratio": "2", "interval": "[1.5, 2.5]", "against": "{data.kwargs.pause: 0.01}"}


def here() -> str:
    """This machine as a claim has it."""
    cores = usable_cores()
    return f"{environment._processor()}, {cores} thread{'s' if cores > 1 else ''}"


@pytest.mark.slow
def test_a_claim_on_a_planted_cost_holds(command, tiny, tmp_path, slow_set):
    """The user's own data comes by words; the baseline is the one that waits."""
    file = written(PAUSE, head="")
    done, found = command("recipe", "verify", str(file), *tiny(*SLOW_SET))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds here too, on other hardware" in done.stdout
    assert [row["label"] for row in found["rows"]] == ["data.kwargs.pause=0.01", "claimed"]
    assert "data.kwargs.pause=0.01" in found["rows"][0]["overrides"]
    assert found["rows"][0]["device"] == here()
    page = next(Path("outputs/compare").rglob("compare.html")).read_text()
    assert "drivetrain recipe verify claimed.yaml" in page
    assert "holds here too" in page


@pytest.mark.slow
def test_a_claim_of_nothing_does_not_hold(command, tiny):
    written({**GOOD, "device": here(), "ratio": "9", "interval": "[8, 10]", "against": "{epochs: 3}"}, head="epochs: 2\n")
    done, found = command("recipe", "verify", "claimed.yaml", *tiny("rounds=6", "block_s=0.02"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "does not hold: " in found["notes"][-1]
    assert "claimed 9.00 × (8.00 to 10.00)" in done.stdout


def test_shipped_recipes_claims_are_good():
    for name in places.names():
        found = places.read(name)
        assert found.claim is None or check.validate(compose([], base=found.baseline(options())))
