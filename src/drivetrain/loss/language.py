"""Losses over tokens, one target for each token of a sequence."""

from __future__ import annotations

import math

from drivetrain.core.device import sum_dtype
from drivetrain.core.lazy import torch
from drivetrain.loss.base import Loss


class NextToken(Loss):
    """Cross entropy of the next token. An evaluation reports it in nats, and in bits per token (here a token is a byte)."""

    metrics = ("loss", "bits_per_byte")
    best = ("bits_per_byte", min)
    tokens = True

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of logits (n, length, classes) against tokens (n, length); targets of -100 (padding) do not count."""
        return _token_loss(output, target, "mean")

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sums of the loss in nats and in bits, and the number of tokens: float64 (3,)."""
        loss = _token_loss(output, target, "sum").to(sum_dtype(output.device))
        return torch.stack([loss, loss / math.log(2), (target >= 0).sum().to(loss.dtype)])


def _token_loss(output: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = output.float() if output.dtype.itemsize < 4 else output  # 16 bits are too few for a sum over tokens
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=reduction)
