"""optimizer=schedulefree: AdamW that averages its weights and needs no schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Lt

from drivetrain.core.lazy import torch
from drivetrain.core.option import Momentum, NonNegative, Positive, RunSpec
from drivetrain.optimizer.base import Implementation, Optimizer


@dataclass(kw_only=True, eq=False)
class ScheduleFree(Optimizer):
    """Schedule-free AdamW (Defazio et al. 2024): drivetrain.optimizer.algorithms.flat_optimizer has the formulas.

    The averaged weights are evaluated and saved. BatchNorm's running statistics are those of the trained weights.
    """

    elementwise = True
    decays_by_lr = True
    in_chunks = True
    lr: Positive = 2.5e-3
    weight_decay: NonNegative = 0.01
    beta1: Annotated[float, Gt(0), Lt(1)] = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not run.scheduler.constant:
            yield (
                f"{run.named('optimizer')} averages the weights where others lower the learning rate, and wants it to rise "
                f"or stay, but {run.named('scheduler')} lowers it: set scheduler=constant, with scheduler.warmup as you like"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.ema.active:
            yield f"{run.named('optimizer')} evaluates an average already: {run.named('ema')} averages the trained weights"

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms import flat_optimizer

        return flat_optimizer.ScheduleFree(groups, loop=implementation == "loop", **self.arguments())

    def eval_weights(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        return optimizer.averaged()  # type: ignore[attr-defined]
