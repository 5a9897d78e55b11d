"""LARS."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drivetrain.optimizer.algorithms.flat_optimizer import Chunk
from drivetrain.optimizer.algorithms.layerwise_optimizer import LayerwiseOptimizer


class Lars(LayerwiseOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, algorithm 1), for each parameter w with gradient g:

        λ = trust · ‖w‖ / (‖g‖ + decay · ‖w‖)
        v ← momentum · v + lr · λ · (g + decay · w)
        w ← w - v                                    (nesterov: w - lr · λ · (g + decay · w) - momentum · v)

    As in the paper, the learning rate is part of the momentum: a change of it does not rescale what v has accumulated.
    λ is 1, which is plain SGD, where ‖w‖ or ‖g‖ is zero, and in groups with `adapt=False`. The paper adapts every layer;
    common practice does not adapt norms and biases.
    """

    state_vectors = ("momentum_buffer",)
    measures = 2

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        trust: float,
        adapt: bool = True,
        loop: bool = False,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "trust": trust}
        super().__init__(params, {**defaults, "adapt": adapt}, loop)

    def measure(self, chunk: Chunk, group: dict[str, Any]) -> tuple[Tensor, ...]:
        w, g = chunk.weights(), chunk.grads()
        torch.add(g, w, alpha=group["weight_decay"], out=chunk.vectors["work"])
        return (chunk.norms(w), chunk.norms(g)) if group["adapt"] else ()

    def move(self, chunk: Chunk, group: dict[str, Any], *norms: Tensor) -> None:
        step, v, lr, momentum = chunk.vectors["work"], chunk.vectors["momentum_buffer"], group["lr"], group["momentum"]
        if norms:
            w_norm, g_norm = norms
            ratio = group["trust"] * w_norm / (g_norm + group["weight_decay"] * w_norm)
            chunk.scaled(step, lr * torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0))
        else:
            step.mul_(lr)
        v.mul_(momentum).add_(step)
        if group["nesterov"]:
            step.add_(v, alpha=momentum)
        chunk.subtract("work" if group["nesterov"] else "momentum_buffer")
