"""NovoGrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drivetrain.optimizer.algorithms.flat_optimizer import Chunk
from drivetrain.optimizer.algorithms.layerwise_optimizer import LayerwiseOptimizer


class NovoGrad(LayerwiseOptimizer):
    """Layer-wise second moments (Ginsburg et al. 2019, algorithm 1), for each parameter w with gradient g:

        v₁ = ‖g₁‖²,  then  v ← β2 · v + (1 - β2) · ‖g‖²        (one number)
        m ← β1 · m + (g / (√v + ε) + decay · w)                (grad_averaging: times 1 - β1)
        w ← w - lr · m

    with m = 0 before the first step. There is no bias correction, since v starts at its first value. A first gradient of zero
    (before a layer whose weights start at zero) is not taken as that value; if it were, the next gradient would be divided by
    √(1 - β2) of its norm.
    """

    state_vectors = ("exp_avg",)
    state_numbers = ("exp_avg_sq",)
    measures = 1

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_averaging: bool,
        loop: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "grad_averaging": grad_averaging}
        super().__init__(params, defaults, loop)

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        g = chunk.grads()
        self._move(chunk, group, g, chunk.norms(g))

    def measure(self, chunk: Chunk, group: dict[str, object]) -> tuple[Tensor, ...]:
        return (chunk.norms(chunk.grads()),)

    def move(self, chunk: Chunk, group: dict[str, object], *norms: Tensor) -> None:
        self._move(chunk, group, chunk.grads(), *norms)

    def _move(self, chunk: Chunk, group: dict[str, Any], g: Tensor, norms: Tensor) -> None:
        m, v = chunk.vectors["exp_avg"], chunk.numbers["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        squared = norms.square()
        v.copy_(torch.where(v == 0, squared, torch.lerp(v, squared, 1 - beta2)))
        update = chunk.scaled(g, 1 / (v.sqrt() + group["eps"]))
        if group["weight_decay"]:
            update.add_(chunk.weights(), alpha=group["weight_decay"])
        m.mul_(beta1).add_(update, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        chunk.subtract("exp_avg", group["lr"])
