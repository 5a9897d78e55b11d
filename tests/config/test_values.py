"""What a setting's value may be, whoever gives it."""

import math

import pytest

from drivetrain.config.validate import knob_problems
from drivetrain.config.values import type_problems
from drivetrain.optimizer import AdamW
from drivetrain.recipe.safe_yaml import MAX_WHOLE


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_is_finite(value):
    assert ["finite" in told for told in type_problems("part", {"knob": (float, value)})] == [True]


@pytest.mark.parametrize("hint", [int, float, list[int]])
def test_a_whole_number_is_one_that_a_library_takes(hint):
    def problems(number: int) -> list[str]:
        return list(type_problems("part", {"knob": (hint, [number] if hint == list[int] else number)}))

    assert not problems(MAX_WHOLE)
    assert len(problems(MAX_WHOLE + 1)) == len(problems(-MAX_WHOLE - 1)) == 1


def test_a_knob_that_the_class_does_not_take():
    """The second guard: Hydra's own refuses such a key first, wherever it knows the option's keys."""
    assert list(knob_problems("optimizer", AdamW, {"lr": 0.1, "lrr": 0.1})) == ["optimizer.lrr: AdamW takes no such argument"]
