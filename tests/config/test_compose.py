"""Composing: what the tests put together is what Hydra composes."""

from __future__ import annotations

import random

import pytest
from omegaconf import OmegaConf

from drivetrain.config import catalog
from tests.support import composed


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_sections_put_together_are_the_config_that_hydra_composes(seed: int) -> None:
    draw, overrides = random.Random(seed), []
    for group, options in catalog.options().items():
        if draw.random() < 0.4:
            several = ",".join(draw.sample(options, min(2, len(options))))
            overrides.append(f"{group}=[{several}]" if group in catalog.LISTS else f"{group}={draw.choice(options)}")
    whole, put_together = composed.by_hydra(tuple(overrides), ()), composed.from_sections(tuple(overrides), ())
    assert put_together == whole
    assert OmegaConf.to_yaml(put_together) == OmegaConf.to_yaml(whole)
