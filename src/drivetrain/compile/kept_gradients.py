"""Gradients that outlive the next replay of the CUDA graph which made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.step import WrappingStep


@dataclass(eq=False)
class KeptGradients(WrappingStep):
    """Copies each gradient out of a CUDA graph's memory, which the graph's next replay overwrites (pytorch #169545).

    An update's first backward gives a parameter the graph's own tensor for its gradient; a further backward adds to what is
    there, in place. So a gradient is copied once an update, and once in a run where `zero_grad` keeps it and writes zeros.
    """

    parameters: Sequence[torch.nn.Parameter]
    _kept: dict[int, torch.Tensor] = field(default_factory=dict, init=False)  # by a parameter's id

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.inner.micro_batch(batch, loss_sum)
        new = [(p, p.grad) for p in self.parameters if p.grad is not None and p.grad is not self._kept.get(id(p))]
        if not new:
            return
        for p, gradient in new:
            p.grad = self._kept.setdefault(id(p), torch.empty_like(gradient))
        torch._foreach_copy_([self._kept[id(p)] for p, _ in new], [gradient for _, gradient in new])
