"""Lion."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.optimizer.algorithms.flat_optimizer import Chunk, FlatOptimizer


class Lion(FlatOptimizer):
    """Evolved sign momentum (Chen et al. 2023, algorithm 2), for each parameter w with gradient g:

    u = sign(β1 · m + (1 - β1) · g)
    w ← w - lr · (u + decay · w)
    m ← β2 · m + (1 - β2) · g
    """

    state_vectors = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        loop: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, loop)

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        g, m = chunk.grads(), chunk.vectors["exp_avg"]
        beta1, beta2 = group["betas"]
        u = torch.lerp(m, g, 1 - beta1, out=chunk.vectors["work"]).sign_()
        if group["weight_decay"]:
            u.add_(chunk.weights(), alpha=group["weight_decay"])
        m.lerp_(g, 1 - beta2)
        chunk.subtract("work", group["lr"])
