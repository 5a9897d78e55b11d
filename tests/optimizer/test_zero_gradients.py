"""A layer's trust ratio with no gradient or no weight is 1, not a division by zero."""

import pytest
import torch

from drivetrain.optimizer.algorithms.lamb import Lamb
from drivetrain.optimizer.algorithms.lars import Lars


@pytest.mark.parametrize("zero", ["weights", "gradients"])
def test_lamb(zero):
    weight = torch.nn.Parameter(torch.zeros(4) if zero == "weights" else torch.ones(4))
    weight.grad = torch.full((4,), 2.0) if zero == "weights" else torch.zeros(4)
    optimizer = Lamb(
        [weight], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, bias_correction=True, max_grad_norm=1.0, fused=False
    )
    optimizer.step()
    expected = torch.full((4,), -0.1) if zero == "weights" else torch.ones(4)  # the step of Adam, whose ratio is 1; or none
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("zero", ["weights", "gradients"])
def test_lars(zero):
    weight = torch.nn.Parameter(torch.zeros(4) if zero == "weights" else torch.ones(4))
    weight.grad = torch.full((4,), 2.0) if zero == "weights" else torch.zeros(4)
    optimizer = Lars([weight], lr=0.1, momentum=0.0, weight_decay=0.5, nesterov=False, trust=0.001)
    optimizer.step()
    expected = torch.full((4,), -0.2 if zero == "weights" else 0.95)  # plain SGD, with its decay
    torch.testing.assert_close(weight.detach(), expected)
