"""Recipes that ship hold what their descriptions promise. Whether each is valid, and does what it claims: tests/test_zoo.py."""

import torch

from drivetrain.launch.job import prepare


def test_the_recipe_for_a_gpu_is_fast_and_what_only_a_gpu_gains_from():
    fast, gpu = (prepare([f"recipe={name}"]).run for name in ("fast", "fast_gpu"))
    differ = {group for group in fast.choices if fast.choices[group] != gpu.choices[group]}
    assert differ == {"loader", "compile"}
    assert (gpu.choices["loader"], gpu.choices["compile"]) == ("device", "inductor")
    assert gpu.optimizer.fused


def test_on_a_cpu_the_recipe_for_a_gpu_says_what_it_cannot_do_there():
    loader = prepare(["recipe=fast_gpu"]).run.loader
    (line,) = loader.autotune(None, 1, 9, torch.device("cpu"))
    assert "loader=device: the device is the CPU" in line
    assert loader.autotune(None, 1, 9, torch.device("cuda")) == []
