"""`drivetrain recipe diff`: the keys that differ, what each side came to, and a measurement where it is asked for."""

import json
import re
from pathlib import Path

import pytest

from drivetrain.cli import main

CLAIM = """\
defaults:
  - override /precision: bf16
claim:
  speed: {ratio: 1.91, interval: [1.85, 1.97], against: {precision: fp32}}
  device: {kind: cpu, name: a chip}
  versions: {torch: 2.15.0}
"""


@pytest.fixture
def diff(capsys):
    """What it says; it must succeed."""

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main.main(["recipe", "diff", *map(str, words)]) == 0
        return capsys.readouterr().out

    return run


def cells(said: str) -> dict[str, list[str]]:
    """A table's rows by their names."""
    rows = [re.split(r"  +", line.strip()) for line in said.splitlines() if line.startswith(" ") and line.strip()]
    return {name: texts for name, *texts in rows}


def test_two_recipes(diff):
    Path("a.yaml").write_text(CLAIM)
    said = diff("a.yaml", "naive", "epochs=3")
    found = cells(said)
    assert found["precision"] == ["bf16", "fp32"]
    assert found["optimizer"] == ["adamw", "sgd"]
    assert found["optimizer.lr"] == ["0.003", "0.02"]
    assert "optimizer.nesterov" not in found, "an option's knobs stand there only where both have them"
    assert not {"epochs", "saving", "logger", "recipe"} & set(found)
    assert "a.yaml claims 1.91 × (1.85 to 1.97) the samples a second of precision=fp32; on a chip" in said
    assert "to measure the difference: drivetrain compare recipe=a.yaml,naive epochs=3" in said
    assert not Path("outputs").exists()


def test_the_same(diff):
    assert "the configs are the same" in diff("naive", "naive")


def test_two_runs(diff, train, tiny):
    one, other = train("optimizer.lr=0.05").run_dir, train("optimizer.lr=0.01", "updates=3").run_dir
    found = cells(diff(one, other))
    assert found["optimizer.lr"] == ["0.05", "0.01"]
    assert found["updates"] == ["2", "3"]
    assert found["status"] == ["completed", "completed"]
    results = [json.loads((run / "result.json").read_text()) for run in (one, other)]
    assert found["accuracy at the end"] == [f"{r['metrics']['test']['final']['accuracy']:.4f}" for r in results]
    assert found["run time"] == [f"{r['wall_s']:.1f} s" for r in results]
    assert "torch" not in found, "versions stand there where they differ"
    facts = json.loads((other / "environment.json").read_text())
    facts["versions"]["torch"] = "1.13\033[2J"
    (other / "environment.json").write_text(json.dumps(facts))
    said = diff(one, other)
    assert cells(said)["torch"][1].split()[0] == "1.13"
    assert "\033" not in said, "files of a run steer no terminal"


def test_a_run_and_the_recipe_it_leaves_are_the_same(diff, train):
    run_dir = train("precision=bf16", "optimizer.momentum=0.5").run_dir
    assert "the configs are the same" in diff(run_dir, run_dir / "recipe.yaml")


def test_a_run_that_left_little_is_shown_as_far_as_it_goes(diff, train):
    run_dir = train().run_dir
    for name in ("result.json", "metrics.jsonl", "environment.json", "recipe.yaml"):
        (run_dir / name).unlink()
    assert cells(diff(run_dir, "naive"))["optimizer.lr"] == ["0.05", "0.02"]


def test_a_runs_recipe_is_what_is_measured(diff, train):
    """Its own code is not started from its files: `drivetrain compare` wants it on the command line."""
    run_dir = train().run_dir
    assert f"drivetrain compare recipe={run_dir}/recipe.yaml,naive" in diff(run_dir, "naive")
