"""Composing: what the tests put together is what Hydra composes."""

from __future__ import annotations

import random
from typing import Literal

import pytest
from omegaconf import OmegaConf

from drivetrain.config import catalog
from drivetrain.config.values import type_problems
from drivetrain.core.allowed import FileName
from drivetrain.data.base import Fraction
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


def test_an_error_in_a_rule_is_not_taken_for_an_option_that_is_missing(monkeypatch):
    """A rule that asks for what is wrong says nothing; one that is itself wrong fails, whatever else is."""
    from drivetrain.core.errors import UserError
    from drivetrain.launch.job import prepare
    from drivetrain.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "validate", lambda self, run: [f"{run.optimizer.lr} {run.values['epochs']}"])
    for word in ("optimizer=adaw", "optimizer.lr=-1", "epochs=0"):
        with pytest.raises(UserError) as refused:
            prepare(["scheduler=constant", word])
        assert len(refused.value.problems) == 1, refused.value.problems
    monkeypatch.setattr(Scheduler, "validate", lambda self, run: run.optimizer.no_such_setting)
    with pytest.raises(AttributeError, match="no_such_setting"):
        prepare(["scheduler=constant", "epochs=0"])


@pytest.mark.parametrize(
    ("hint", "value", "must"),
    [
        (float, "foo", "must be a number"),
        (Fraction | None, "foo", "must be a number or null"),
        (Literal["auto"] | Fraction | FileName | None, False, "must be 'auto', a number, a text or null"),
        (Literal["auto", "all"] | None, 3, "must be one of 'auto' or 'all' or null"),
        (list[int] | None, [], ""),
    ],
)
def test_a_message_names_all_that_a_value_may_be(hint, value, must):
    text = str(value).lower() if isinstance(value, bool) else value
    assert list(type_problems("data", {"validation": (hint, value)})) == ([f"data.validation={text}: {must}"] if must else [])
