"""The loss that is trained and the sums that are reported."""

import math

import pytest
import torch

from drivetrain.loss.classification import CrossEntropy

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
TARGET = torch.tensor([0, 2, 0])
BY_HAND = [
    math.log(math.exp(2) + 2) - 2,
    math.log(3),
    math.log(math.e + 2),
]  # −log softmax at the target


def test_an_evaluation_is_without_smoothing():
    assert torch.equal(CrossEntropy(label_smoothing=0.3).sums(LOGITS, TARGET), CrossEntropy().sums(LOGITS, TARGET))


def test_the_sums_are_of_losses_hits_and_samples():
    loss, correct, count = CrossEntropy().sums(LOGITS, TARGET).tolist()
    assert loss == pytest.approx(sum(BY_HAND), rel=1e-6)
    assert (correct, count) == (1.0, 3.0)


def test_an_evaluation_takes_probabilities_of_classes():
    certain = torch.nn.functional.one_hot(TARGET, LOGITS.shape[1]).double()
    torch.testing.assert_close(CrossEntropy().sums(LOGITS, certain), CrossEntropy().sums(LOGITS, TARGET))


def test_sums_of_sixteen_bit_logits_are_made_in_float32_and_added_as_wide_as_the_device_can(monkeypatch):
    sums = CrossEntropy().sums(LOGITS.bfloat16(), TARGET)
    torch.testing.assert_close(sums, CrossEntropy().sums(LOGITS, TARGET), rtol=1e-6, atol=0)  # these logits are exact
    assert sums.dtype == torch.float64
    monkeypatch.setattr("drivetrain.loss.classification.sum_dtype", lambda device: torch.float32)
    assert CrossEntropy().sums(LOGITS, TARGET).dtype == torch.float32
