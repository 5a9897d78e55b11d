"""Losses over tokens, one target for each token of a sequence."""

from __future__ import annotations

import math

from drivetrain.core.device import sum_dtype
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count
from drivetrain.loss.base import Loss

PADDING = -100  # a target that does not count


class NextToken(Loss):
    """Cross entropy of the next token. An evaluation reports it in nats, and in bits per token (here a token is a byte).

    With `chunks` the loss is computed in that many parts, each of them again in the backward. Then the float32 logits and
    their softmax exist for one part at a time: with a large vocabulary they are most of a model's memory.
    """

    metrics = ("loss", "bits_per_byte")
    best = ("bits_per_byte", min)
    takes = ("tokens",)

    def __init__(self, chunks: Count = 1) -> None:
        self.chunks = chunks

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of logits (n, length, classes) against tokens (n, length); targets of -100 (padding) do not count."""
        return _token_loss(output, target, "mean") if self.chunks == 1 else self._in_chunks(output, target)

    def _in_chunks(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        def part(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            arguments = (_token_loss, logits, tokens, "sum")
            return checkpoint(*arguments, use_reentrant=False, preserve_rng_state=False)  # nothing in it is random

        rows = zip(output.flatten(0, 1).chunk(self.chunks), target.flatten().chunk(self.chunks), strict=True)
        total = torch.stack([part(*row) for row in rows]).sum()
        return total / (target != PADDING).sum()

    def sums(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sums of the loss in nats and in bits, and the number of tokens (3,)."""
        loss = _token_loss(output, target, "sum").to(sum_dtype(output.device))
        return torch.stack([loss, loss / math.log(2), (target >= 0).sum().to(loss.dtype)])


def _token_loss(output: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = output.float() if output.dtype.itemsize < 4 else output  # 16 bits are too few for a sum over tokens
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction=reduction, ignore_index=PADDING)
