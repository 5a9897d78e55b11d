"""Losses over tokens, one target for each token of a sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.core.device import sum_dtype
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, NonNegative, RunSpec
from drivetrain.core.trees import shape_of
from drivetrain.loss.base import Loss, too_few
from drivetrain.loss.classification import lowest_and_highest

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

PADDING = -100  # a target that does not count
PART = 1 << 26  # logits of which the loss is computed at a time: 256 MiB in float32


class NextToken(Loss):
    """Cross entropy of the next token. An evaluation reports it in nats, and in bits per token (here a token is a byte).

    With `chunks` the loss is computed in that many parts, each of them again in the backward. Then the float32 logits and
    their softmax exist for one part at a time: with a large vocabulary they are most of a model's memory. By default a part has
    at most 2^26 logits, so that small batches and vocabularies are one part. `z_loss` adds to
    each token's loss so much of the square of its logits' logsumexp, in training (PaLM, Chowdhery et al. 2022).
    """

    metrics = ("loss", "bits_per_byte")
    best = ("bits_per_byte", min)
    takes = ("tokens",)

    def see(self, run: RunSpec) -> None:
        if not run.data.byte_tokens:
            self.metrics, self.best = ("loss", "bits_per_token"), ("bits_per_token", min)

    def __init__(self, chunks: Count | Literal["auto"] = "auto", z_loss: NonNegative = 0.0) -> None:
        self.chunks, self.z_loss = chunks, z_loss

    def setup(self, context: BuildContext) -> None:
        # Where each token of a sample is a target, and the lengths are known, the batch weights micro-batches by them already.
        weighed = context.batch.lengths is not None and context.batch.weighs_by_length
        self.counted = not (weighed and context.run.data.each_token_counts)

    def __call__(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        """Mean loss of logits (n, length, classes) against tokens (n, length); targets of -100 (padding) do not count."""
        if self.counted:
            return super().__call__(output, target)
        if self._parts(output) == 1:
            return _token_loss(output, target, "mean", self.z_loss)
        return self._sum(output, target) / (target != PADDING).sum()

    def sum_and_count(self, output: torch.Tensor, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total = self._sum(output, target)
        return total, self.count(target).to(total.dtype)

    def count(self, target: Any) -> torch.Tensor:
        return (target != PADDING).sum().to(sum_dtype(target.device))

    def problem(self, target: Any, classes: int) -> str | None:
        if target.is_floating_point() or target.dim() != 2:
            return f"are {target.dtype} of shape {shape_of(target)}, and it wants token numbers (n, length)"
        low, high = lowest_and_highest(target, PADDING)
        if low < 0 or high >= classes:
            return f"are tokens from {low} to {high}, but the model has {classes} outputs"
        return None

    def output_problem(self, output: tuple[int, ...], classes: int) -> str | None:
        return too_few(output[-1], classes, "tokens")

    def _parts(self, output: torch.Tensor) -> int:
        return math.ceil(output.numel() / PART) or 1 if self.chunks == "auto" else self.chunks

    def _sum(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if (parts := self._parts(output)) == 1:
            return _token_loss(output, target, "sum", self.z_loss)
        from torch.utils.checkpoint import checkpoint

        def part(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            arguments = (_token_loss, logits, tokens, "sum", self.z_loss)
            return checkpoint(*arguments, use_reentrant=False, preserve_rng_state=False)  # nothing in it is random

        rows = zip(output.flatten(0, 1).chunk(parts), target.flatten().chunk(parts), strict=True)
        return torch.stack([part(*row) for row in rows]).sum()

    def sums(self, output: torch.Tensor, target: Any) -> torch.Tensor:
        """Sums of the loss in nats and in bits, and the number of tokens (3,)."""
        loss = _token_loss(output, target, "sum").to(sum_dtype(output.device))
        return torch.stack([loss, loss / math.log(2), (target >= 0).sum().to(loss.dtype)])


def _token_loss(output: torch.Tensor, target: torch.Tensor, reduction: str, z_loss: float = 0.0) -> torch.Tensor:
    logits = output.float() if output.dtype.itemsize < 4 else output  # 16 bits are too few for a sum over tokens
    logits, target = logits.flatten(0, -2), target.flatten()
    loss = torch.nn.functional.cross_entropy(logits, target, reduction=reduction, ignore_index=PADDING)
    if not z_loss:
        return loss
    counts = target != PADDING
    squares = logits.logsumexp(1).square().masked_fill(~counts, 0).sum()
    return loss + z_loss * (squares / counts.sum() if reduction == "mean" else squares)
