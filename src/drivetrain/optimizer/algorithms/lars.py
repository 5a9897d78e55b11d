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
        if chunk.by_tensors:
            tensors = (chunk.params, chunk.shaped_grads()) if group["adapt"] else ()
            return tuple(torch.stack(torch._foreach_norm(of_each)) for of_each in tensors)
        w, g = chunk.weights(), chunk.grads()
        torch.add(g, w, alpha=group["weight_decay"], out=chunk.vectors["work"])
        return (chunk.norms(w), chunk.norms(g)) if group["adapt"] else ()

    def move(self, chunk: Chunk, group: dict[str, Any], *norms: Tensor) -> None:
        rates = group["lr"]  # lr · λ
        if norms:
            w_norm, g_norm = norms
            ratio = group["trust"] * w_norm / (g_norm + group["weight_decay"] * w_norm)
            rates = rates * torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
        if chunk.by_tensors:
            self._move_tensors(chunk, group, torch.as_tensor(rates, dtype=chunk.dtype).expand(len(chunk.params)))
            return
        step, v, momentum = chunk.vectors["work"], chunk.vectors["momentum_buffer"], group["momentum"]
        if norms:
            chunk.scaled(step, rates)
        else:
            step.mul_(rates)
        v.mul_(momentum).add_(step)
        if group["nesterov"]:
            step.add_(v, alpha=momentum)
        chunk.subtract("work" if group["nesterov"] else "momentum_buffer")

    def _move_tensors(self, chunk: Chunk, group: dict[str, Any], rates: Tensor) -> None:
        """Update the parameters where they are, without a vector of g + decay · w: its two terms are added one by one."""
        weights, grads, v = chunk.params, chunk.shaped_grads(), chunk.shaped("momentum_buffer")
        momentum, decays = group["momentum"], rates * group["weight_decay"]
        chunk.vectors["momentum_buffer"].mul_(momentum)
        torch._foreach_addcmul_(v, grads, rates.unbind())
        if group["weight_decay"]:
            torch._foreach_addcmul_(v, weights, decays.unbind())
        if group["nesterov"]:
            torch._foreach_mul_(weights, (1 - decays).unbind())
            torch._foreach_addcmul_(weights, grads, rates.neg().unbind())
            torch._foreach_add_(weights, v, alpha=-momentum)
        else:
            torch._foreach_sub_(weights, v)
