"""Errors in code of the user's are told with what to set, and where they stand."""

import itertools
import shutil
import sys

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.machine import guards
from tests.support import my_messages

OWN = ["trust=[my_messages]", "data=own", "data.target=my_messages.Numbers"]


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """The code as a file beside the run, which its ranks can import too."""
    shutil.copy(my_messages.__file__, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sys.modules.pop("my_messages", None)
    yield
    sys.modules.pop("my_messages", None)


def test_a_wrong_shape_names_the_users_line_first(train, caplog):
    result = train(*OWN, "model=own", "model.target=my_messages.Wrong", ends="failed")
    assert result.error.startswith("my_messages.py:")
    assert ": return self.head(x): RuntimeError: " in result.error
    assert "mat1 and mat2 shapes cannot be multiplied (12x6 and 7x3)" in result.error
    assert not [line for line in caplog.messages if "no MFU" in line]


def test_parameters_without_gradients_are_named_under_ddp(train):
    words = [*OWN, "model=own", "model.target=my_messages.Unused", "parallel=ddp", "parallel.nproc=2"]
    with pytest.raises(
        UserError, match=r"spare.weight, spare.bias got none in an update: set parallel.find_unused_parameters=true"
    ):
        train(*words)
    train(*words, "parallel.find_unused_parameters=true")


def test_halves_of_a_dataset_train(fitted):
    assert next(iter(fitted(*OWN, "data.kwargs={kind: half}").read())).x.dtype == torch.float32


@pytest.mark.parametrize(("kind", "described"), [("image", r"a tensor \(n, 3, 4, 4\)"), ("several", "a dict of")])
def test_targets_that_are_no_classes_are_told_what_to_set(make, kind, described):
    with pytest.raises(
        UserError, match=rf"targets of .* are {described}.*set data.targets=values where they are numbers or images"
    ):
        make(*OWN, f"data.kwargs={{kind: {kind}}}")


@pytest.mark.parametrize(("waited", "told"), [(30.0, 1), (1.5, 0), (0.0, 0)])
def test_a_busy_machine_is_said_once_with_what_to_set(train, caplog, monkeypatch, waited, told):
    """The kernel's account of the main thread, faked: it has run for 2 s at each look, and waited for as long as said."""
    looks = itertools.count()
    monkeypatch.setattr(guards, "waited_s", lambda: (900.0 + 2.0 * (n := next(looks)), waited * n))  # before the run too
    train("epochs=2", "log_every=1", "runtime.threads=2")
    lines = [line for line in caplog.messages if "the cores of this machine are busy" in line]
    assert len(lines) == told
    assert not told or ("waited for one for 94 % of its time" in lines[0] and "set runtime.threads=auto, or 1 (2 now" in lines[0])
