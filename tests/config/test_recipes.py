"""Recipes that ship hold what their descriptions promise. Whether each is valid, and does what it claims: tests/test_zoo.py."""

import pytest
import torch
from bench.gpu import speed
from bench.gpu.loops import Work

from drivetrain.launch.job import prepare


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder of packed images."""
    folder = tmp_path_factory.mktemp("images") / "packed"
    speed.pack(Work((), (3, 224, 224), 2, batch=4, steps=1), folder)
    return folder


def test_the_recipe_for_a_gpu_is_fast_and_what_only_a_gpu_gains_from():
    fast, gpu = (prepare([f"recipe={name}"]).run for name in ("fast", "fast_gpu"))
    differ = {group for group in fast.choices if fast.choices[group] != gpu.choices[group]}
    assert differ == {"loader", "compile"}
    assert (gpu.choices["loader"], gpu.choices["compile"]) == ("resident", "step")


@pytest.mark.parametrize("words", [[], ["model.name=vit_base_patch16_224", "optimizer=adamw", "optimizer.lr=0.001"]])
def test_the_recipe_for_large_models_trains_them_compiled_on_bytes(words, packed):
    large = prepare(["recipe=imagenet_gpu", f"data.root={packed}", *words]).run
    assert (large.choices["loader"], large.choices["compile"], large.choices["precision"]) == ("device", "inductor", "bf16")
    assert large.loader.augments_on_device
    assert large.optimizer.fused


def test_on_a_cpu_the_recipe_for_a_gpu_says_what_it_cannot_do_there(packed):
    loader = prepare(["recipe=imagenet_gpu", f"data.root={packed}"]).run.loader
    (line,) = loader.autotune(None, 1, 9, torch.device("cpu"))
    assert "loader=device: the device is the CPU" in line
    assert loader.autotune(None, 1, 9, torch.device("cuda")) == []
