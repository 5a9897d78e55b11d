"""A recipe that ships trains as it did when its claim was measured, whatever became of defaults and presets since.

measured.json has the settings of that time: all of the default run, and for each recipe what differs from it. After a new
measurement, `python -m tests.recipe.test_measured` writes it anew.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.compose import compose
from drivetrain.core.machine.files import read_yaml
from drivetrain.core.machine.paths import recipes_dir

FILE = Path(__file__).with_name("measured.json")
CLAIMED = [file.stem for file in sorted(recipes_dir().glob("*.yaml")) if "claim" in read_yaml(file)]


def settings(overrides: list[str]) -> dict[str, Any]:
    """The chosen options, and every setting by its dotted key."""
    composed = compose(overrides)
    assert not composed.problems
    found: dict[str, Any] = {}

    def walk(tree: dict[str, Any], above: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                walk(value, f"{above}{key}.")
            elif key != "_target_":
                found[above + key] = value

    walk(composed.unresolved, "")
    return found | {f"{group}=": choice for group, choice in composed.choices.items()}


def differing(recipe: str, default: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe that are not those of the default run; GONE stands for those that it has not."""
    now = settings([f"recipe={recipe}"])
    return {key: now.get(key, GONE) for key in sorted({*default, *now}) if now.get(key, GONE) != default.get(key, GONE)}


GONE = "gone"


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("recipe", CLAIMED)
def test_a_recipe_trains_as_it_was_measured(recipe, measured):
    assert recipe in measured["recipes"], f"write {FILE.name} anew (see the docstring)"
    then, now = measured["default"] | measured["recipes"][recipe], settings([f"recipe={recipe}"])
    # A setting that came later is not looked at: its default must be what was done before.
    changed = {key: (was, now.get(key, GONE)) for key, was in then.items() if was not in (now.get(key, GONE), GONE)}
    assert not changed, (
        f"measured with the first, trains with the second: {changed}. Name the first in the recipe, or measure again"
    )


if __name__ == "__main__":
    default = settings([])
    recipes = {recipe: differing(recipe, default) for recipe in CLAIMED}
    FILE.write_text(json.dumps({"default": default, "recipes": recipes}, indent=1, sort_keys=True) + "\n")
