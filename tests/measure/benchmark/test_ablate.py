"""`drivetrain ablate`: that its arms are the baseline with, and the recipe without, exactly what they are named for."""

import pytest

from drivetrain.launch.job import prepare
from drivetrain.measure.benchmark.ablate import overrides_of, techniques

PAIRS = [
    ("naive", "fast", []),
    ("naive", "fast", ["model=mlp", "surgery=[]"]),
    ("default", "fast", ["data=digits"]),
    ("fast", "naive", []),
]


@pytest.fixture(params=PAIRS, ids=lambda p: " ".join([p[0], p[1], *p[2]]))
def both(request):
    baseline, recipe, words = request.param
    given = [f"recipe={baseline}", *words], [f"recipe={recipe}", *words]
    return given, tuple(map(prepare, given))


def test_all_techniques_together_make_the_one_the_other(both):
    (from_words, to_words), (baseline, recipe) = both
    found = techniques(baseline, recipe)
    assert baseline.config_hash != recipe.config_hash
    assert prepare([*from_words, *overrides_of(baseline, found, True)]).config_hash == recipe.config_hash
    assert prepare([*to_words, *overrides_of(recipe, found, False)]).config_hash == baseline.config_hash


def test_each_technique_changes_something_and_nothing_twice(both):
    (from_words, _), (baseline, recipe) = both
    found = techniques(baseline, recipe)
    hashes = {prepare([*from_words, *overrides_of(baseline, [t], True)]).config_hash for t in found}
    assert len(hashes) == len(found)
    assert baseline.config_hash not in hashes
