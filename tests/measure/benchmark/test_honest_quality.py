"""The campaign on verdicts: what it plants does something, and is never a PASS."""

import pytest
from bench import honest
from bench.honest import BREAKS, HARMLESS, Arm

from drivetrain.measure.benchmark.noninferiority import FAIL, PASS
from drivetrain.measure.benchmark.quality import Plan

# In the stream, in an augmentation, in the average, in a gradient and in the evaluation.
PLANTED_EACH_WAY = (
    "labels of one row in ten are shifted", "mixup without mixing labels", "ema is never updated",
    "the first layer's gradient is lost", "no normalisation in the evaluation",
)  # fmt: skip


def test_what_is_planted_changes_a_run_and_what_is_not_does_not():
    base = honest.trained(Arm(), 0)
    assert honest.trained(Arm(), 0).figures == base.figures
    for name in PLANTED_EACH_WAY:
        run = honest.trained(BREAKS[name], 0)
        assert run.error is None, name
        assert run.figures != base.figures, name


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_never_a_pass(name):
    assert honest.judged(BREAKS[name], 0, Plan()).outcome != PASS


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_is_no_fail(name):
    assert honest.judged(HARMLESS[name], 0, Plan()).outcome != FAIL
