"""The reader and the validation of recipes, fuzzed: a valid config or a UserError, no traceback, no effect, no long wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from drivetrain.cli import recipe
from drivetrain.config.catalog import LISTS
from drivetrain.core import nvidia_driver
from drivetrain.core.paths import recipes_dir
from drivetrain.launch.job import prepare
from drivetrain.recipe import reader as recipes
from tests.support import odd
from tests.support.recipe_mutants import FILES, alike, mutants, written


def outcome(file: Path, text: str, most_said: int = odd.MOST_SAID) -> str:
    """Check a recipe as `drivetrain recipe check` does."""
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return odd.outcome(lambda: recipe.check(recipes.read(file)), file, Path("recipes"), most_said=most_said)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvidia_driver, "installed", lambda: False)  # parallel=dp asks the machine for its devices, by a process
        prepare([])  # what the first config imports and reads is no effect of a recipe, and none of its time
        recipe.check(recipes.read(recipes_dir() / "articles_ladder.yaml"))
        yield tmp_path_factory.mktemp("fuzz")


@odd.fuzz
def test_mutants_of_recipes(place: Path) -> None:
    odd.tried(mutants(), lambda text: outcome(place / "recipe.yaml", text))


@pytest.mark.slow
@pytest.mark.parametrize("group", [group for group in FILES if group != "logger"])
def test_each_setting_of_each_option_with_extreme_values(group: str, place: Path) -> None:
    for option, content in FILES[group].items():
        chosen = [option] if group in LISTS else option
        for setting in sorted({*content} - {"_target_", "preset"}):
            key = f"{group}.{f'{option}.' if group in LISTS else ''}{setting}"
            for value in alike(content[setting]):
                recipe = {"defaults": [{f"override /{group}": chosen}], key: value}
                outcome(place / "recipe.yaml", "\n".join(written(recipe, 0)) + "\n")


def swept(**axes: list[object]) -> str:
    return yaml.safe_dump({"sweep": axes})


SIX_LEVELS = range(1, 7)
BOMBS = {
    "references, six levels": "model.unfreeze.a0: x\n"
    + "".join(f"model.unfreeze.a{n}: '{f'${{model.unfreeze.a{n - 1}}}' * 30}'\n" for n in SIX_LEVELS),
    "references in lists": "model.unfreeze.a0: 1\n"
    + "".join(f"model.unfreeze.a{n}: [{', '.join([f'${{model.unfreeze.a{n - 1}}}'] * 30)}]\n" for n in SIX_LEVELS),
    "a chain of references": "".join(f"model.unfreeze.a{n}: ${{model.unfreeze.a{n + 1}}}\n" for n in range(400)),
    "a chain, its end first": "".join(f"model.unfreeze.a{n}: ${{model.unfreeze.a{n + 1}}}\n" for n in reversed(range(400))),
    "cycles": "defaults:\n  - override /scheduler: cosine\nscheduler:\n  cycles: 1000000000000\n",
    "cycles beyond all numbers": "defaults:\n  - override /scheduler: cosine\nscheduler:\n  cycles: 9\n  cycle_mult: 1.0e+300\n",
    "epochs": "epochs: 1000000000000\n",
    "epochs of a growing batch": "epochs: 1000000\nbatch:\n  grow_every: 1\ndata:\n  drop_last: false\n",
    "a batch that grows for ever": "epochs: 1000000\nbatch:\n  grow_every: 100000000000\n  grow_by: 1000000000000\n",
    "many combinations": swept(precision=["fp32", "bf16"], optimizer=["sgd", "lion"], epochs=list(range(1, 200))),
    "too many combinations": swept(epochs=list(range(1, 900)), updates=[1, 2]),
    "a folder that nobody named": "defaults:\n  - override /data: packed\n",
    "brackets": "a: " + "[" * 60_000,
    "braces": "a: " + "{" * 60_000,
    "keys": "".join(f"? a{n}\n" for n in range(9000)),
    "dashes": "- " * 30_000,
    "a long line": "description: " + "x " * 30_000,
    "a long key": "x" * 60_000 + ": 1",
    "dots": "a" + ".a" * 30_000 + ": 1",
    "quotes": "a: " + "'" * 60_001,
    "a pattern": "optimizer:\n  no_weight_decay: ['" + "*a" * 90 + "']\n",
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_file_is_little_work(case: str, place: Path) -> None:
    outcome(place / "recipe.yaml", BOMBS[case], most_said=10**6)  # each of its lines may be refused
