"""Own models, and drivetrain's, train where timm and torchvision are not installed; what needs them says what to install."""

import sys

import pytest

from drivetrain.config import validate
from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from drivetrain.parallel import tensor


@pytest.fixture
def without_timm(monkeypatch):
    """As if neither were installed, also for modules of them that were loaded already."""
    for name in {*sys.modules, "timm", "torchvision"}:
        if name.partition(".")[0] in ("timm", "torchvision"):
            monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("words", [["model=timm", "model.name=resnet18"], ["optimizer=timm"]])
def test_what_needs_timm_says_so(words, tiny, without_timm):
    with pytest.raises(
        UserError, match=rf"{words[0]} needs the package 'timm', which is not installed: pip install 'drivetrain\[timm\]'"
    ):
        validate.validate_device(prepare(tiny(*words)).run)


def test_a_run_needs_neither(train, without_timm):
    result = train("updates=1", "saving=none")
    assert result.status == "completed", result.error
    assert tensor.plan_for(object()) is None
