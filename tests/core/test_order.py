"""Orders of samples: pure functions of seed and epoch, with the frequencies that they state."""

import pytest
import torch

from drivetrain.core import order as orders
from drivetrain.core.errors import UserError
from drivetrain.core.order import AGAIN, Order, checked, index_of, numbered

LABELS = torch.tensor([0] * 80 + [1] * 15 + [2] * 5)
KINDS = {
    "shuffled": orders.shuffled(100), "sequential": orders.sequential(100), "balanced": orders.balanced(LABELS),
    "weighted": orders.weighted(torch.arange(100.0)), "repeated": orders.shuffled(100, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_an_order_follows_from_seed_and_epoch_alone(name):
    order = KINDS[name]
    assert order.length == len(order(0, 0)) == 100
    assert torch.equal(order(3, 4), order(3, 4))
    assert len(order(3, 4).unique()) == 100  # what comes again has another number
    assert ((index_of(order(3, 4)) >= 0) & (index_of(order(3, 4)) < 100)).all()
    same = torch.equal(order(0, 0), order(0, 1)), torch.equal(order(0, 0), order(1, 0))
    assert same == ((True, True) if name == "sequential" else (False, False))


def drawn(order: Order, epochs: int = 200) -> torch.Tensor:
    return torch.stack([index_of(order(0, epoch)) for epoch in range(epochs)])


def test_frequencies_are_those_that_are_stated():
    shares = LABELS[drawn(KINDS["balanced"])].flatten().bincount() / 20_000
    assert (shares - 1 / 3).abs().max() < 0.015
    counts = drawn(KINDS["weighted"]).flatten().bincount(minlength=100) / 200
    assert counts[0] == 0  # of weight 0
    assert (counts - torch.arange(100) / 49.5).abs().max() < 0.45
    repeated = drawn(KINDS["repeated"], 1)[0]
    assert torch.equal(repeated[:99].view(33, 3), repeated[:99:3, None].expand(33, 3))
    assert len(repeated.unique()) == 34


def test_what_comes_again_is_numbered_in_its_order():
    assert numbered(torch.tensor([5, 2, 5, 5, 2])).tolist() == [5, 2, 5 + AGAIN, 5 + 2 * AGAIN, 2 + AGAIN]


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -1.0], [1.0, float("inf")], [1.0, float("nan")]])
def test_weights_that_cannot_be_drawn_by_are_refused(weights):
    with pytest.raises(UserError, match="needs weights that are finite"):
        orders.weighted(torch.tensor(weights))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (torch.rand(3), r"gives \[3\] of torch.float32"),
        (torch.zeros(3, 1, dtype=torch.int64), r"gives \[3, 1\]"),
        ([0, 1, 10], "gives sample 10 in epoch 2, and there are 0 to 9"),
        ([0, -1, 3], "gives sample -1 in epoch 2"),
    ],
)
def test_an_order_that_is_none_is_refused(given, says):
    with pytest.raises(UserError, match=says):
        checked(lambda seed, epoch: given, 10, "order", 0, 1)


def test_an_order_of_another_length_in_another_epoch_is_refused():
    with pytest.raises(UserError, match=r"gives 3 samples in epoch 3, and 4 in the first one: .*data\.validation"):
        Order(4, lambda seed, epoch: torch.arange(5 - epoch))(0, 2)
