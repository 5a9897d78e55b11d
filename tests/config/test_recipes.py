"""The recipes that ship: each is a valid run, and holds what its description promises."""

import pytest
import torch

from drivetrain.core.paths import recipes_dir
from drivetrain.launch.job import prepare
from drivetrain.recipe import reader as recipe

# A sweep is many runs; the sweep's tests have it.
NAMES = sorted(file.stem for file in recipes_dir().glob("*.yaml") if not recipe.read(file).sweep)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_that_ships_is_valid(name):
    assert prepare([f"recipe={name}"]).run.choices


def test_the_recipe_for_a_gpu_is_fast_and_what_only_a_gpu_gains_from():
    fast, gpu = (prepare([f"recipe={name}"]).run for name in ("fast", "fast_gpu"))
    differ = {group for group in fast.choices if fast.choices[group] != gpu.choices[group]}
    assert differ == {"loader", "compile"}
    assert (gpu.choices["loader"], gpu.choices["compile"]) == ("device", "inductor")
    assert gpu.optimizer.fused


def test_on_a_cpu_the_recipe_for_a_gpu_says_what_it_cannot_do_there():
    loader = prepare(["recipe=fast_gpu"]).run.loader
    (line,) = loader.autotune(None, 1, torch.device("cpu"))
    assert "loader=device: the device is the CPU" in line
    assert loader.autotune(None, 1, torch.device("cuda")) == []
