"""Optimizers that run an update's forward and backward themselves, several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import Count, Few, NonNegative, Positive, RunSpec
from drivetrain.optimizer.base import Implementation, Optimizer
from drivetrain.optimizer.torch_optim import Sgd


@dataclass(kw_only=True, eq=False)
class Lbfgs(Optimizer):
    """L-BFGS (Liu & Nocedal 1989; torch.optim.LBFGS): up to `max_iter` steps along estimated Newton directions in each update."""

    takes_closure = True
    step_waits = "its line search reads each loss"
    lr: Positive = 1.0
    weight_decay: NonNegative = 0.0
    max_iter: Count = 20
    max_eval: Count | None = None
    tolerance_grad: NonNegative = 1e-7
    tolerance_change: NonNegative = 1e-9
    history_size: Few = 10
    line_search_fn: Literal["strong_wolfe"] | None = "strong_wolfe"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if self.weight_decay or self.layer_decay is not None or self.lr_multipliers:
            yield (
                "optimizer=lbfgs has one rate for all parameters, and no weight decay: set optimizer.weight_decay=0 "
                "optimizer.layer_decay=null optimizer.lr_multipliers={} adapter.lr_ratio=1"
            )
        if any(edit.memory_format == "channels_last" for edit in run.surgery):
            yield (
                "optimizer=lbfgs and surgery=[channels_last] exclude each other (torch's LBFGS reads gradients as rows in their "
                "usual order): leave channels_last out"
            )

    def make(self, groups: list[dict[str, Any]], implementation: Implementation) -> torch.optim.Optimizer:
        settings = {**self.arguments(), "lr": groups[0]["lr"]}
        del settings["weight_decay"]
        return torch.optim.LBFGS([p for group in groups for p in group["params"]], **settings)


@dataclass(kw_only=True, eq=False)
class Sam(Sgd):
    """Sharpness-aware minimization (Foret et al. 2021): the gradient at the worst weights within `rho` of the current ones.

    SGD makes the update. With `adaptive` the distance is relative to the weights (Kwon et al. 2021).
    """

    takes_closure = True
    elementwise = False
    rho: Positive = 0.05
    adaptive: bool = False

    def algorithm(self) -> Callable[..., torch.optim.Optimizer]:
        from drivetrain.optimizer.algorithms import sam

        return sam.Sam
