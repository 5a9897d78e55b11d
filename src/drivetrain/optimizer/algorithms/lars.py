"""LARS."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.optimizer.algorithms.flat import Chunk, Flat


class Lars(Flat):
    """Layer-wise adaptive rate scaling (You, Gitman & Ginsburg 2017, algorithm 1), for each parameter w with gradient g:

        λ = trust · ‖w‖ / (‖g‖ + decay · ‖w‖)
        v ← momentum · v + lr · λ · (g + decay · w)
        w ← w - v                                    (nesterov: w - lr · λ · (g + decay · w) - momentum · v)

    The learning rate stands inside the momentum, as in the paper: a change of it does not act on what v has gathered.
    λ = 1, plain SGD, where ‖w‖ or ‖g‖ is zero and in groups with `adapt=False`: the paper adapts every layer, practice
    leaves out norms and biases.
    """

    kept = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust: float = 0.001,
        adapt: bool = True,
        loop: bool = False,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "trust": trust}
        super().__init__(params, {**defaults, "adapt": adapt}, loop)

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        w, g, v = chunk.weights(), chunk.grads(), chunk.vectors["momentum_buffer"]
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        step = torch.add(g, w, alpha=decay, out=chunk.vectors["work"])
        if group["adapt"]:
            w_norm, g_norm = chunk.norms(w), chunk.norms(g)
            ratio = group["trust"] * w_norm / (g_norm + decay * w_norm)
            chunk.scaled(step, lr * torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0))
        else:
            step.mul_(lr)
        v.mul_(momentum).add_(step)
        if group["nesterov"]:
            step.add_(v, alpha=momentum)
        chunk.subtract("work" if group["nesterov"] else "momentum_buffer")
