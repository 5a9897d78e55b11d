"""`drivetrain ablate`: that its arms are the baseline with, and the recipe without, exactly what they are named for."""

from pathlib import Path

import pytest

from drivetrain.launch.job import prepare
from drivetrain.measure.benchmark.ablate import techniques
from tests.support import json_keys, pages

PAIRS = [
    ("naive", "fast", []),
    ("naive", "fast", ["model=mlp", "surgery=[]"]),
    ("default", "fast", ["data=digits"]),
    ("fast", "naive", []),
    ("default", "digits_stages", ["epochs=10"]),
]


@pytest.fixture(params=PAIRS, ids=lambda p: " ".join([p[0], p[1], *p[2]]))
def both(request):
    baseline, recipe, words = request.param
    given = [f"recipe={baseline}", *words], [f"recipe={recipe}", *words]
    return given, tuple(map(prepare, given))


def test_all_techniques_together_make_the_one_the_other(both):
    (from_words, to_words), (baseline, recipe) = both
    added, removed = techniques(baseline, recipe), techniques(recipe, baseline)
    assert {change.key for change in added.found()} == {change.key for change in removed.found()}
    assert baseline.config_hash != recipe.config_hash
    assert prepare([*from_words, *added.overrides(added.found())]).config_hash == recipe.config_hash
    assert prepare([*to_words, *removed.overrides(removed.found())]).config_hash == baseline.config_hash


def test_each_technique_changes_something_and_nothing_twice(both):
    (from_words, _), (baseline, recipe) = both
    added = techniques(baseline, recipe)
    found = added.found()
    hashes = {prepare([*from_words, *added.overrides([each])]).config_hash for each in found}
    assert len(hashes) == len(found)
    assert baseline.config_hash not in hashes


def test_a_stage_that_is_left_out_has_the_runs_own_config_as_long_as_it_lasts():
    stages = "stages=[{until:0.2,clip:norm,clip.max_norm:2},{until:'5ep'},{model.freeze:[head.*]}]"
    baseline, recipe = prepare(["epochs=10"]), prepare(["epochs=10", stages])
    added, removed = techniques(baseline, recipe), techniques(recipe, baseline)
    first, last = added.found()
    assert first.label == "stage until 0.2: clip=norm clip.max_norm=2"
    assert added.overrides([last]) == ["stages=[{until:0.2},{until:'5ep'},{model.freeze:['head.*']}]"]
    first, last = removed.found()
    assert removed.overrides([last]) == ["stages=[{until:0.2,clip:norm,clip.max_norm:2},{until:'5ep'},{}]"]
    assert removed.overrides([first, last]) == ["stages=null"]
    (whole,) = techniques(prepare(["epochs=10", "stages=[{until: 1ep, clip: norm}]"]), recipe).found()
    assert prepare(["epochs=10", whole.label]).config_hash == recipe.config_hash


def test_a_recipe_with_one_technique_more_leaves_its_tables_and_a_page(command, tiny):
    for name, more in (("plain", ""), ("better", "clip: {max_norm: 0.5}\n")):
        text = "# @package _global_\ndefaults:\n  - override /clip: norm\n  - _self_\n"
        Path(f"{name}.yaml").write_text(text + more)
    words = ["recipe=better.yaml", "baseline=plain.yaml", "rounds=1", "block_s=0.02", "tables=[alone,steps]"]
    done, found = command("ablate", *words, *tiny())
    assert done.returncode == 0, done.stderr
    assert list(found) == ["From plain.yaml to better.yaml, step by step", "plain.yaml and one technique more"]
    for each in found.values():
        json_keys.check_compare(each, " recipe baseline tables")
        assert [row["label"] for row in each["rows"]] == ["plain.yaml", "+ clip.max_norm=0.5"]
    assert "+ clip.max_norm=0.5" in done.stdout
    pages.check(next(Path("outputs/ablate").rglob("ablate.html")).read_text())
