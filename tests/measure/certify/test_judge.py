"""The verdict on two traces, and the plan of samples: on made-up entries."""

from __future__ import annotations

import numpy as np
import torch

from drivetrain.core.microbatch import Request
from drivetrain.measure.certify import judge
from drivetrain.measure.certify.judge import Floors
from drivetrain.measure.certify.record import plan_of
from drivetrain.measure.certify.trace import Entry, Trace

W1, W2, INSIDE = (1, "weights", "w"), (2, "weights", "w"), (1, "forward", "layer")


def trace(values: dict, rounding: float = 1e-6) -> Trace:
    return Trace({key: Entry(np.array([value]), rounding) for key, value in values.items()})


def verdict(tested: dict, reference: dict, floors: Floors | None = None, coarser: bool = False):
    return judge.judge(trace(tested), trace(reference), floors or Floors(), coarser)


def test_eight_times_the_floor_is_rounding_and_more_is_not():
    assert verdict({W1: 1 + 7e-6}, {W1: 1.0}).answer == judge.EXACT
    found = verdict({W1: 1 + 9e-6}, {W1: 1.0})
    assert (found.answer, found.first.key) == (judge.DIFFERS, W1)


def test_the_first_difference_is_named():
    found = verdict({W1: 1.1, W2: 1.2}, {W1: 1.0, W2: 1.0})
    assert found.first.key == W1


def test_a_layer_inside_does_not_decide_and_is_named_where_something_does():
    assert verdict({INSIDE: 2.0, W1: 1.0}, {INSIDE: 1.0, W1: 1.0}).answer == judge.EXACT
    assert verdict({INSIDE: 2.0, W1: 2.0}, {INSIDE: 1.0, W1: 1.0}).first.key == INSIDE


def test_other_formats_are_within_rounding_unless_all_bits_are_equal():
    assert verdict({W1: 1 + 1e-6}, {W1: 1.0}, coarser=True).answer == judge.CLOSE
    same = verdict({W1: 1.0}, {W1: 1.0}, coarser=True)
    assert (same.answer, same.bit_for_bit) == (judge.EXACT, True)


def test_other_data_or_another_loss_is_no_flip():
    gradient = (1, "gradient", "w")
    assert judge.may_have_flipped(verdict({gradient: 2.0, W1: 1.0}, {gradient: 1.0, W1: 1.0}))
    for phase in ("samples", "start", "inputs", "targets", "learning rate", "loss"):
        found = verdict({gradient: 2.0, (1, phase, "x"): 2.0}, {gradient: 1.0, (1, phase, "x"): 1.0})
        assert not judge.may_have_flipped(found)
    assert not judge.may_have_flipped(verdict({W1: 1.0}, {W1: 1.0}))


def test_what_is_nothing_in_the_reference_has_a_floor():
    none, one = {(1, "evaluation", "accuracy"): 0.0}, {(1, "evaluation", "accuracy"): 0.1}
    assert verdict(one, none).answer == judge.DIFFERS
    assert verdict(one, none, Floors(permuted=[trace(one)])).answer == judge.EXACT


def test_a_floor_is_the_largest_of_all_updates_up_to_the_next():
    reference = {(n, "weights", "w"): 1.0 for n in range(1, 5)}
    permuted = trace({(n, "weights", "w"): 1.0 + (1e-3 if n == 2 else 1e-6) for n in range(1, 5)})
    floors = Floors(permuted=[permuted]).relative_to(trace(reference, 0.0))
    found = [floors[n, "weights", "w"] for n in range(1, 5)]
    assert np.allclose(found, [1e-3] * 4)


def test_samples_and_weights_of_all_ranks_add_up_and_what_only_fills_up_counts_nothing():
    def requests(rank: int):
        yield Request(0, torch.tensor([2 * rank, 2 * rank + 1]), 4 / 5, last=False)
        yield Request(0, torch.tensor([4]), 2 / 5 if rank == 0 else 0.0, True, True)

    one, other = (plan_of(requests(rank), 2) for rank in range(2))
    assert one["number of samples"] + other["number of samples"] == 5
    assert np.allclose(one["weights of the micro-batches"] + other["weights of the micro-batches"], 1.0)
