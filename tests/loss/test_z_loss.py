"""loss.z_loss is PaLM's penalty by hand, in float64: with smoothing, weights, ignored items, chunks and soft targets."""

import pytest
import torch
import torch.nn.functional as F

from drivetrain.loss.classification import CrossEntropy
from drivetrain.loss.language import NextToken

Z = 0.3


@pytest.fixture(autouse=True)
def _float64(float64):
    torch.manual_seed(1)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def by_hand(output):
    """The square of the logarithm of the sum of exponentials, of each item; classes come second."""
    return output.exp().sum(1).log() ** 2


def counting(loss, weight=None):
    loss.counted, loss.weight = True, None if weight is None else torch.tensor(weight)
    return loss


@pytest.mark.parametrize("counted", [False, True])
def test_over_samples_with_smoothing_and_ignored_ones(counted):
    output, target = torch.randn(9, 3) + 2, torch.randint(3, (9,))
    target[4] = -100
    loss = CrossEntropy(0.1, z_loss=Z)
    loss.counted = counted
    kept = target != -100
    close(loss(output, target), F.cross_entropy(output, target, label_smoothing=0.1) + Z * by_hand(output)[kept].mean())
    close(loss.sums(output, target), CrossEntropy(0.1).sums(output, target))  # an evaluation is without it


def test_over_pixels_with_weights_of_classes():
    output, target, weight = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5)), [0.2, 1.0, 3.0]
    target[0, :2] = -100
    each = torch.tensor(weight)[target.clamp(min=0)] * (target != -100)
    expected = F.cross_entropy(output, target, torch.tensor(weight)) + Z * (by_hand(output) * each).sum() / each.sum()
    close(counting(CrossEntropy(class_weights=weight, z_loss=Z), weight)(output, target), expected)


@pytest.mark.parametrize("counted", [False, True])
def test_with_soft_targets(counted):
    output, target = torch.randn(6, 4), torch.rand(6, 4).softmax(1)
    loss = CrossEntropy(z_loss=Z)
    loss.counted = counted
    close(loss(output, target), F.cross_entropy(output, target) + Z * by_hand(output).mean())


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("counted", [False, True])
def test_over_tokens_and_in_chunks(chunks, counted):
    output, target = torch.randn(3, 5, 7, requires_grad=True), torch.randint(7, (3, 5))
    target[1, 3:] = -100
    loss = NextToken(chunks, Z)
    loss.counted = counted
    flat, kept = output.flatten(0, 1), target.flatten() != -100
    expected = F.cross_entropy(flat, target.flatten()) + Z * by_hand(flat)[kept].mean()
    found = loss(output, target)
    close(found, expected)
    close(torch.autograd.grad(found, output)[0], torch.autograd.grad(expected, output)[0])
    close(loss.sums(output, target), NextToken().sums(output, target))


def test_no_penalty_leaves_the_loss_bit_for_bit(monkeypatch):
    output, target = torch.randn(9, 3).float(), torch.randint(3, (9,))
    monkeypatch.setattr(torch.Tensor, "logsumexp", lambda *_: 1 / 0)
    assert torch.equal(CrossEntropy(0.1)(output, target), F.cross_entropy(output, target, label_smoothing=0.1))
    NextToken()(output.view(3, 3, 3), target.view(3, 3))


def test_it_makes_logits_small_that_softmax_leaves_free():
    """The cross entropy has no gradient along what is added to all logits; the penalty has."""
    output, target = (torch.randn(5, 3) + 10).requires_grad_(), torch.randint(3, (5,))
    (without,) = torch.autograd.grad(CrossEntropy()(output, target), output)
    (penalised,) = torch.autograd.grad(CrossEntropy(z_loss=Z)(output, target), output)
    close(without.sum(1), torch.zeros(5))
    assert (penalised.sum(1) > 0.5).all()


def test_sixteen_bits_suffice():
    output, target = torch.randn(64, 40), torch.randint(40, (64,))
    half = output.bfloat16()
    exact = CrossEntropy(z_loss=Z)(half.double(), target)
    loss = counting(CrossEntropy(z_loss=Z))
    torch.testing.assert_close(loss(half, target).double(), exact, rtol=1e-6, atol=0)
