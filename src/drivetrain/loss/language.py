"""Losses over tokens, one target for each token of a sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.options.option import BuildContext, Count, NonNegative, RunSpec, Share
from drivetrain.core.step import rng
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.source import PipelineParts
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Tree, shape_of
from drivetrain.loss.base import Loss, too_few
from drivetrain.loss.classification import lowest_and_highest

PADDING = -100  # a target that does not count
STREAM = 15  # of the random numbers of samples
MASKED, CHANGED = 0.8, 0.9  # of the tokens that are hidden: become the mask's token, or any other
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
    takes: tuple[TargetKind, ...] = ("tokens",)

    def resolve(self, run: RunSpec) -> Self:
        if run.data.byte_tokens:
            return self
        return self.with_values(metrics=("loss", "bits_per_token"), best=("bits_per_token", min))

    def __init__(self, chunks: Count | Literal["auto"] = "auto", z_loss: NonNegative = 0.0) -> None:
        self.chunks, self.z_loss = chunks, z_loss

    def setup(self, context: BuildContext) -> None:
        # Where each token of a sample is a target, and the lengths are known, the batch weights micro-batches by them already.
        weighed = context.batch.lengths is not None and context.batch.weighs_by_length
        self.counted = not (weighed and context.run.data.each_token_counts)

    def __call__(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Mean loss of logits (n, length, classes) against tokens (n, length); targets of -100 (padding) do not count."""
        if self.counted:
            return super().__call__(output, target)
        if self._parts(output) == 1:
            return _token_loss(output, target, "mean", self.z_loss)
        found: torch.Tensor = self._sum(output, target) / (target != PADDING).sum()
        return found

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        total = self._sum(output, target)
        return total, self.count(target).to(total.dtype)

    def count(self, target: Tree) -> torch.Tensor:
        found: torch.Tensor = (target != PADDING).sum().to(sum_dtype(target.device))
        return found

    def problem(self, target: Tree, classes: int) -> str | None:
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

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Sums of the loss in nats and in bits, and the number of tokens (3,)."""
        loss = _token_loss(output, target, "sum").to(sum_dtype(output.device))
        return torch.stack([loss, loss / math.log(2), (target >= 0).sum().to(loss.dtype)])


class TokenClass(NextToken):
    """Cross entropy of a class at each token that has one, as the first token of each word has. Reports accuracy too."""

    metrics = ("loss", "accuracy")
    best = ("accuracy", max)
    takes: tuple[TargetKind, ...] = ("words",)

    def resolve(self, run: RunSpec) -> Self:
        """Report the same metrics for any tokens."""
        return self

    def setup(self, context: BuildContext) -> None:
        self.counted = True  # not every token has a class

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Sums of the loss and of what is right, and the number of tokens that have a class (3,)."""
        loss = _token_loss(output, target, "sum").to(sum_dtype(output.device))
        correct, count = (output.argmax(-1) == target).sum(), (target != PADDING).sum()
        return torch.stack([loss, correct.to(loss.dtype), count.to(loss.dtype)])


class MaskedToken(TokenClass):
    """Cross entropy of tokens that are hidden from the model (Devlin et al. 2019), drawn for each sample and epoch.

    Of a text's tokens the share `share` is chosen: 80 % of these become the mask's token, 10 % any token, and 10 % stay. The
    mask's token is that of the model's own tokenizer; where tokens are the data's own, it is the last of them.
    """

    best = ("loss", min)
    takes = ("tokens",)
    masks_tokens = True

    def __init__(self, share: Share = 0.15, chunks: Count | Literal["auto"] = "auto", z_loss: NonNegative = 0.0) -> None:
        super().__init__(chunks, z_loss)
        self.share = share

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.model.tokens:
            yield (
                f"loss=masked_token hides tokens within a text, and {run.named('model')} reads only what is before: set "
                "model=transformers with model.name=bert or another, or loss=next_token"
            )

    def steps(self, data: Any) -> tuple[Masking, ...]:
        if not isinstance(data.two_samples(torch.device("meta")), torch.Tensor):
            raise UserError("loss=masked_token hides tokens of one sequence, and the inputs of a sample are several")
        if data.pad_token is not None and data.mask_token is None:
            raise UserError(
                "loss=masked_token hides tokens, and the model's tokenizer has no mask_token: set another model.name, or "
                "loss=next_token"
            )
        own = data.mask_token if data.mask_token is not None else data.classes - 1
        return (Masking(self.share, own, data.pad_token or 0),)


@dataclass(frozen=True)
class Masking:
    """Turns samples of a text to be continued into such with hidden tokens: what follows is what was read."""

    share: float
    mask: int
    padding: int
    mixes = False

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, pipeline: PipelineParts, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens (n, length) of which some are hidden, these alone as targets, and the indices."""
        keys = rng.keys(pipeline.seed, request.epoch, indices, STREAM).unsqueeze(1)
        places = keys ^ torch.arange(y.shape[1], device=y.device)
        chosen, becomes, other = (rng.uniform(0, 0, places, number) for number in range(3))
        hidden, tokens = (chosen < self.share) & (y != PADDING), y.masked_fill(y == PADDING, self.padding)
        masked = torch.where(becomes < MASKED, self.mask, (other * pipeline.classes).long())
        return torch.where(hidden & (becomes < CHANGED), masked, tokens), y.masked_fill(~hidden, PADDING), indices

    def crop_boxes(self, seed: int, epoch: int, indices: torch.Tensor) -> None:
        """Return None: texts are read whole."""


def _token_loss(output: torch.Tensor, target: torch.Tensor, reduction: str, z_loss: float = 0.0) -> torch.Tensor:
    logits = output.float() if output.dtype.itemsize < 4 else output  # 16 bits are too few for a sum over tokens
    logits, target = logits.flatten(0, -2), target.flatten()
    loss = torch.nn.functional.cross_entropy(logits, target, reduction=reduction, ignore_index=PADDING)
    if not z_loss:
        return loss
    counts = target != PADDING
    squares = logits.logsumexp(1).square().masked_fill(~counts, 0).sum()
    return loss + z_loss * (squares / counts.sum() if reduction == "mean" else squares)
