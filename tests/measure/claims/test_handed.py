"""`--recipe FILE` of compare, ablate, tune and doctor: what was measured becomes a recipe with its claim."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.launch.job import prepare
from drivetrain.measure.benchmark.arms import ArmSpec
from drivetrain.measure.benchmark.comparison import Comparison, Settings
from drivetrain.measure.benchmark.noninferiority import FAIL, PASS, Verdict
from drivetrain.measure.benchmark.row import Row
from drivetrain.measure.claims import write
from drivetrain.measure.intervals import Interval
from drivetrain.recipe import reader as recipe

WORDS = {"precision=fp32": ["precision=fp32"], "precision=bf16": ["precision=bf16"], "optimizer=sgd": ["optimizer=sgd"]}


def compared(**ratios: tuple[float, float, float] | None) -> tuple[Comparison, list[ArmSpec]]:
    """Three arms, of which the others have these ratios."""
    given = [(1.0, 1.0, 1.0), ratios["bf16"], ratios["sgd"]]
    rows = [
        Row(label, [], ratio=Interval(*ratio) if ratio else None, device="a chip", device_type="cpu")
        for label, ratio in zip(WORDS, given, strict=True)
    ]
    specs = [ArmSpec(label, words, prepare(["model=mlp", *words])) for label, words in WORDS.items()]
    return Comparison(rows, [], [], Settings(), {}, 1.0), specs


def hand_on(done: Comparison, specs: list[ArmSpec], last: bool = False) -> Path:
    file = Path("mine.yaml")
    file.unlink(missing_ok=True)
    write.writer("compare", file, last)(done, specs)
    return file


def test_the_fastest_arm_is_handed_on(capsys):
    done, specs = compared(bf16=(1.5, 1.4, 1.6), sgd=(1.2, 1.1, 1.3))
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


def test_of_an_ablation_it_is_the_whole_recipe():
    done, specs = compared(bf16=(1.5, 1.4, 1.6), sgd=(1.2, 1.1, 1.3))
    assert recipe.read(hand_on(done, specs, last=True)).choices["optimizer"] == "sgd"


@pytest.mark.parametrize("ratio", [None, (1.5, 0.0, float("inf")), (1.05, 0.95, 1.15), (0.5, 0.4, 0.6)])
def test_without_proof_nothing_is_written(ratio, capsys):
    file = hand_on(*compared(bf16=ratio, sgd=None))
    assert not file.exists()
    assert "mine.yaml is not written: no variant is faster than the first beyond doubt" in capsys.readouterr().out


def test_without_a_file_nothing_is_handed_on():
    assert write.writer("compare", None) is None


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
