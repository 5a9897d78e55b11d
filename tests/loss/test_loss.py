"""The loss that is trained and the sums that are reported."""

import math

import pytest
import torch

from drivetrain.loss import language
from drivetrain.loss.classification import CrossEntropy
from drivetrain.loss.language import NextToken

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_loss_in_chunks_is_the_loss(dtype, monkeypatch):
    monkeypatch.setattr(language, "PART", 70)  # 231 logits are four parts
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(11, (3, 7), generator=generator)
    target[0, :5] = -100  # padding
    losses, gradients = [], []
    for chunks in (1, 4, "auto"):
        output = torch.randn(3, 7, 11, generator=generator.manual_seed(1), dtype=torch.float64).to(dtype).requires_grad_()
        losses.append(NextToken(chunks)(output, target))
        (gradient,) = torch.autograd.grad(losses[-1], output)
        gradients.append(gradient)
    close = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-5}
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], **close)
        torch.testing.assert_close(gradient, gradients[0], **close)
    assert torch.equal(losses[2], losses[1])


def test_a_loss_in_chunks_keeps_less_for_the_backward():
    def kept(chunks) -> int:
        sizes = []
        output, target = torch.randn(2, 64, 50).bfloat16().requires_grad_(), torch.zeros(2, 64, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            NextToken(chunks)(output, target)
        return max(sizes)

    assert kept(8) < kept(1) / 8
    assert kept("auto") == kept(1)  # of few logits
