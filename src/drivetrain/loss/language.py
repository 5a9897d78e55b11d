"""Losses over tokens, one target for each token of a sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.options.option import BuildContext, Count, NonNegative, RunSpec, Share
from drivetrain.core.step import rng
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.source import PipelineParts
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Forward, Tree, shape_of
from drivetrain.loss.base import SMALLEST, Loss, too_few, wide
from drivetrain.loss.classification import lowest_and_highest

if TYPE_CHECKING:
    from drivetrain.loss.parted_head import PartedHead

PADDING = -100  # the label of ignored targets
STREAM = 15  # key of the samples' random numbers
MASKED, CHANGED = 0.8, 0.9  # cumulative shares of hidden tokens that become the mask's token, then any other
PART = 12 << 20  # logits in memory at once: 48 MiB in float32
LARGE = 1 << 15  # from this number of classes on, logits are computed in parts


class NextToken(Loss):
    """Cross entropy of the next token. An evaluation reports it in nats, and in bits per token (here a token is a byte).

    With `chunks` the output layer and the loss are computed together in that many parts of the tokens, so that only one part's
    logits exist at a time: with a large vocabulary they dominate a model's memory. The default does it from 32,768 classes on,
    if the output layer is one product, in parts of 12 million logits. An evaluation does it too unless a metric reads the
    logits. In training, `z_loss` adds that multiple of the squared logsumexp of each token's logits (PaLM, Chowdhery et al.
    2022).
    """

    metrics = ("loss", "bits_per_byte")
    best = ("bits_per_byte", min)
    takes: tuple[TargetKind, ...] = ("tokens",)
    head: PartedHead | None = None  # the model's output layer, if its logits are computed in parts

    def resolve(self, run: RunSpec) -> Self:
        if run.data.byte_tokens:
            return self
        return self.with_values(metrics=("loss", "bits_per_token"), best=("bits_per_token", min))

    def __init__(self, chunks: Count | Literal["auto"] = "auto", z_loss: NonNegative = 0.0, label_smoothing: Share = 0.0) -> None:
        self.chunks, self.z_loss, self.label_smoothing = chunks, z_loss, label_smoothing

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.chunks not in ("auto", 1) and (why := self._obstacle(run)):
            yield f"{self.target_key}.chunks={self.chunks} computes the output layer in parts, and {why}: set it to 1"

    def _obstacle(self, run: RunSpec) -> str:
        """The reason in the options why the output layer cannot be computed with the loss; else ""."""
        if self.target_key != "loss":
            return "a sum of losses takes whole outputs"
        if (
            run.compile.torchscript or run.parallel.thread_per_device or not run.parallel.own_forward
        ):  # dp's threads share the layer
            return f"{run.named('compile' if run.compile.torchscript else 'parallel')} does not run it in the step's own forward"
        return ""

    def setup(self, context: BuildContext) -> None:
        # If each token of a sample is a target and lengths are known, the batch already weights micro-batches by them.
        weighed = context.batch.lengths is not None and context.batch.weighs_by_length
        self.counted = not (weighed and context.run.data.each_token_counts)

    def read(self, model: torch.nn.Module, context: BuildContext) -> Iterator[str]:
        if self.chunks == 1 or (self.chunks == "auto" and context.data.classes < LARGE):
            return
        from drivetrain.loss.parted_head import PartedHead

        found = self._obstacle(context.run) or PartedHead.of(model, context)
        if not isinstance(found, str):
            self.head = found
        elif self.chunks == "auto":
            yield f"the loss takes all logits at once: {found}"
        else:
            raise UserError(f"loss.chunks={self.chunks} computes the output layer in parts, and {found}: set loss.chunks=1")

    def step(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
        if self.head is None:
            return super().step(forward, batch)
        sums, output = self._in_parts(self.head, forward, batch, self.z_loss, self.label_smoothing)
        count = self.count(batch.y).to(sums.dtype)
        return (sums[0] + output.sum()) / (count.clamp(min=SMALLEST) if self.counted else count)  # the sum of no logits is 0

    def evaluate(self, forward: Forward, batch: MicroBatch, need_output: bool) -> tuple[Tree, torch.Tensor]:
        if self.head is None or need_output:
            return super().evaluate(forward, batch, need_output)
        sums, output = self._in_parts(self.head, forward, batch)
        loss, right = sums.to(sum_dtype(sums.device)).unbind()
        return output, self.reported(loss, right, self.count(batch.y))

    def _in_parts(
        self, head: PartedHead, forward: Forward, batch: MicroBatch, z_loss: float = 0.0, smoothing: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = batch.y.numel() * head.layer.out_features
        parts = math.ceil(logits / PART) if self.chunks == "auto" else self.chunks
        return head.sums(lambda: forward(batch.x), batch.y, parts, z_loss, smoothing)

    def __call__(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Mean loss of logits (n, length, classes) against tokens (n, length); targets of -100 (padding) do not count."""
        if self.counted:
            return super().__call__(output, target)
        return self._loss(output, target, "mean")

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        total = self._loss(output, target, "sum")
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

    def _loss(self, output: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        return _token_loss(output, target, reduction, self.z_loss, self.label_smoothing)

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """The sums of an evaluation over a batch: see `reported`."""
        loss = _token_loss(output, target, "sum").to(sum_dtype(output.device))
        return self.reported(loss, (output.argmax(-1) == target).sum(), self.count(target))

    def reported(self, loss: torch.Tensor, right: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Sums of the loss in nats and in bits, and the number of tokens (3,)."""
        return torch.stack([loss, loss / math.log(2), count])


class TokenClass(NextToken):
    """Cross entropy of a class at each labelled token, such as the first token of each word. Reports accuracy too."""

    metrics = ("loss", "accuracy")
    best = ("accuracy", max)
    takes: tuple[TargetKind, ...] = ("words",)

    def resolve(self, run: RunSpec) -> Self:
        """Report the same metrics for all kinds of tokens."""
        return self

    def setup(self, context: BuildContext) -> None:
        self.counted = True  # not every token has a class

    def reported(self, loss: torch.Tensor, right: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Sums of the loss and of correct answers, and the number of labelled tokens (3,)."""
        return torch.stack([loss, right.to(loss.dtype), count])


class MaskedToken(TokenClass):
    """Cross entropy of tokens hidden from the model (Devlin et al. 2019), drawn for each sample and epoch.

    A share `share` of a text's tokens is chosen: 80 % of these become the mask's token, 10 % any token, and 10 % stay. The
    mask's token is from the model's own tokenizer; for the data's own tokens it is the last one.
    """

    best = ("loss", min)
    takes = ("tokens",)
    masks_tokens = True

    def __init__(
        self,
        share: Share = 0.15,
        chunks: Count | Literal["auto"] = "auto",
        z_loss: NonNegative = 0.0,
        label_smoothing: Share = 0.0,
    ) -> None:
        super().__init__(chunks, z_loss, label_smoothing)
        self.share = share

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.model.tokens:
            yield (
                f"loss=masked_token hides tokens within a text, but {run.named('model')} reads only the tokens before: set "
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
    """Turns samples for next-token prediction into samples with hidden tokens."""

    share: float
    mask: int
    padding: int
    mixes = False

    def apply(
        self, x: torch.Tensor, y: torch.Tensor, indices: torch.Tensor, pipeline: PipelineParts, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens (n, length) with some hidden, the hidden ones as targets, and the indices."""
        if y.dim() != 2:
            raise UserError(f"loss=masked_token hides tokens of texts (n, length), and the targets have shape {shape_of(y)}")
        keys = rng.keys(pipeline.seed, request.epoch, indices, STREAM).unsqueeze(1)
        places = keys ^ torch.arange(y.shape[1], device=y.device)
        chosen, becomes, other = (rng.uniform(0, 0, places, number) for number in range(3))
        hidden, tokens = (chosen < self.share) & (y != PADDING), y.masked_fill(y == PADDING, self.padding)
        masked = torch.where(becomes < MASKED, self.mask, (other * pipeline.classes).long())
        return torch.where(hidden & (becomes < CHANGED), masked, tokens), y.masked_fill(~hidden, PADDING), indices

    def crop_boxes(self, seed: int, epoch: int, indices: torch.Tensor) -> None:
        """Return None: texts are read whole."""


def _token_loss(
    output: torch.Tensor, target: torch.Tensor, reduction: str, z_loss: float = 0.0, smoothing: float = 0.0
) -> torch.Tensor:
    logits, target = wide(output).flatten(0, -2), target.flatten()
    cross_entropy = torch.nn.functional.cross_entropy
    loss = cross_entropy(logits, target, reduction=reduction, ignore_index=PADDING, label_smoothing=smoothing)
    if not z_loss:
        return loss
    counts = target != PADDING
    squares = logits.logsumexp(1).square().masked_fill(~counts, 0).sum()
    return loss + z_loss * (squares / counts.sum() if reduction == "mean" else squares)
