"""Functions of the user's get what their parameters name."""

import functools

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.step.model_call import ModelCall
from drivetrain.core.user.call import UserCall

OFFERED = {"output": 1, "target": 2, "input": 3, "batch": 4, "model": 5, "progress": 6}


def made(function, **kwargs):
    return UserCall("loss.target=f", function, kwargs, offers=OFFERED)


class Module(torch.nn.Module):
    """Its forward has the names."""

    def forward(self, x, output):
        return [x, output]


@pytest.mark.parametrize(
    ("function", "gets", "needs"),
    [
        (lambda a, b: [a, b], [1, 2], {"output", "target"}),
        (lambda input, target: [input, target], [1, 2], {"output", "target"}),  # as torch's own losses
        (lambda y_true, y_pred: [y_true, y_pred], [2, 1], {"output", "target"}),  # as scikit-learn's metrics
        (lambda target, output: [target, output], [2, 1], {"output", "target"}),
        (lambda output, x: [output, x], [1, 3], {"output", "input"}),
        (lambda model, batch: [model, batch], [5, 4], {"model", "batch"}),
        (lambda output, *, progress, scale=7: [output, progress, scale], [1, 6, 7], {"output", "progress"}),
        (lambda *args: list(args), [1, 2], {"output", "target"}),
        (lambda output, **rest: [output, rest], [1, {}], {"output"}),
        (functools.partial(lambda k, output, y: [k, output, y], 8), [8, 1, 2], {"output", "target"}),
        (torch.nn.functional.l1_loss, None, {"output", "target"}),
        (Module(), [3, 1], {"input", "output"}),
    ],
)
def test_a_function_gets_what_it_names(function, gets, needs):
    call = made(function)
    assert call.needs == needs
    if gets is not None:
        assert call(**OFFERED) == gets


def test_a_function_by_position_is_called_as_it_is():
    def plain(a, b):
        return a, b

    def in_order(output, y, scale=1):
        return output, y

    for function in (plain, in_order):
        call = made(function)
        assert call.positional
        assert call.function is function  # nothing stands between
        assert call(**OFFERED) == (1, 2)
    assert not made(lambda y, output: 0).positional
    assert not made(lambda output, y, x: 0).positional
    assert not made(lambda output, *, y: 0).positional


def test_further_arguments_are_bound():
    assert made(lambda output, y, scale: [output, y, scale], scale=9)(**OFFERED) == [1, 2, 9]
    assert made(lambda a, b, scale: [a, b, scale], scale=9)(**OFFERED) == [1, 2, 9]
    assert made(lambda scale, output, y: [output, y, scale], scale=9)(**OFFERED) == [1, 2, 9]


@pytest.mark.parametrize("how", ["keywords", "positions", "one"])
def test_a_forward_takes_a_batchs_inputs_or_its_own_arguments(how):
    def forward(a, b=0):
        return a, b

    called = ModelCall(how).taking_batches(forward)
    batch = {"keywords": {"a": 1, "b": 2}, "positions": (1, 2), "one": 1}[how]
    assert called(batch) == (1, 0 if how == "one" else 2)
    assert called(3, b=4) == (3, 4)
    assert called(a=5) == (5, 0)
    assert called(torch.ones(())) == (1, 0)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda output, other: 0, "has a parameter `other`, and it is called with those of output, y_pred, target, y"),
        (lambda a, batch: 0, "names `batch`, and gets what it names only if output or model is among it"),
        (lambda a: 0, r"cannot be called as \(output, target\): its parameters are \(a\)"),
        (lambda a, b, c: 0, r"cannot be called as \(output, target\)"),
        (min, "does not tell its parameters: wrap it in a def"),
    ],
)
def test_what_cannot_be_called_is_refused(function, says):
    with pytest.raises(UserError, match=says):
        made(function)


def test_a_count_is_called_with_the_targets():
    def counting(function):
        return UserCall(
            "count", function, offers=("target", "input", "batch"), positions=("target",), decides=("target", "batch")
        )

    assert counting(lambda anything: anything)(**OFFERED) == 2
    assert counting(lambda x, y: (x, y))(**OFFERED) == (3, 2)
    assert counting(lambda batch: batch)(**OFFERED) == 4
