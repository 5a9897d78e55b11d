"""Metrics of language models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from drivetrain.core.device import sum_dtype
from drivetrain.core.lazy import torch
from drivetrain.metrics.base import Metric, rows

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext
    from drivetrain.metrics.states import State


class Perplexity(Metric):
    """The exponential of the mean loss of a token in nats."""

    name = "perplexity"
    takes = ("tokens",)
    better = "min"

    def create(self, context: BuildContext) -> State:
        from drivetrain.metrics.states import Sums

        self._dtype = sum_dtype(context.device)
        return Sums((2,), self._dtype)

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, tokens = rows(output, target, self.kind)
        nats = torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")  # of -100 (padding) there is none
        return (torch.stack([nats.to(self._dtype), self.amount(tokens).sum().to(self._dtype)]),)

    def amount(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what each token counts, (n,); 0 for padding."""
        return tokens >= 0

    def figures(self, computed: Any) -> dict[str, float]:
        nats, tokens = computed.tolist()
        return {self.name: math.exp(min(nats / tokens, 700.0))}  # the exponential of more is no float


class BitsPerByte(Perplexity):
    """The loss in bits for each byte of the text, which compares models of different tokenizers.

    `Splits.token_bytes` are the bytes of each token of the vocabulary; without it a token is a byte.
    """

    name = "bits_per_byte"

    def create(self, context: BuildContext) -> State:
        given = context.data.token_bytes
        self._bytes = None if given is None else given.to(context.device)
        return super().create(context)

    def amount(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens >= 0 if self._bytes is None else self._bytes[tokens.clamp(min=0)] * (tokens >= 0)

    def figures(self, computed: Any) -> dict[str, float]:
        nats, length = computed.tolist()
        return {self.name: nats / math.log(2) / length}
