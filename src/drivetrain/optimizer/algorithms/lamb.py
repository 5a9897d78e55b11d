"""LAMB and NVLAMB."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.device import sum_dtype
from drivetrain.optimizer.algorithms.flat_optimizer import Chunk
from drivetrain.optimizer.algorithms.layerwise_optimizer import LayerwiseOptimizer


class Lamb(LayerwiseOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, algorithm 2, φ the identity), for each parameter w with gradient g:

        m ← β1 · m + (1 - β1) · g               m̂ = m / (1 - β1^t)
        v ← β2 · v + (1 - β2) · g²              v̂ = v / (1 - β2^t)
        u = m̂ / (√v̂ + ε) + decay · w
        w ← w - lr · ‖w‖ / ‖u‖ · u

    With `bias_correction=False`, m and v take the place of m̂ and v̂. The trust ratio ‖w‖ / ‖u‖ is 1 where ‖w‖ or ‖u‖ is zero,
    and in groups with `adapt=False`: LAMB as published with BERT does not adapt what does not decay (norms, biases), NVLAMB
    does. With `max_grad_norm`, all gradients are first divided by max(1, ‖all gradients‖ / max_grad_norm), as NVLAMB (apex
    FusedLAMB) does; None leaves them as they are. With `fused`, torch's fused Adam kernel computes the first term of u.
    """

    state_vectors = ("exp_avg", "exp_avg_sq")
    measures = 2

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        max_grad_norm: float | None,
        fused: bool,
        adapt: bool = True,
        loop: bool = False,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self._moments: Callable[..., None] = _fused_moments if fused else _moments
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction}
        super().__init__(params, {**defaults, "adapt": adapt}, loop)

    def before_updates(self, chunks: list[Chunk]) -> None:
        self._divisor = None
        if self.max_grad_norm is not None and (chunks or self.own_work):
            self._divisor = (self._norm_of_all(chunks) / self.max_grad_norm).clamp_(min=1.0)

    def _norm_of_all(self, chunks: list[Chunk]) -> Tensor:
        if self.own_work:
            return self._norm([p for group in self.param_groups for p in group["params"]], 2.0)
        device = chunks[0].step.device  # a model may lie on several
        norms = [torch.linalg.vector_norm(chunk.grads()).to(device) for chunk in chunks]
        return torch.linalg.vector_norm(torch.stack(norms))

    def measure(self, chunk: Chunk, group: dict[str, Any]) -> tuple[Tensor, ...]:
        w, g = chunk.weights(), chunk.grads()
        if self._divisor is not None:
            g = g / self._divisor.to(g.device)
        step = chunk.step if group["bias_correction"] else torch.full_like(chunk.step, math.inf)  # β^∞ = 0 corrects nothing
        m, v, u = (chunk.vectors[name] for name in ("exp_avg", "exp_avg_sq", "work"))
        self._moments(g, m, v, step, *group["betas"], group["eps"], u)
        u.add_(w, alpha=group["weight_decay"])
        return (chunk.norms(w), chunk.norms(u)) if group["adapt"] else ()

    def move(self, chunk: Chunk, group: dict[str, Any], *norms: Tensor) -> None:
        if norms:
            w_norm, u_norm = norms
            chunk.scaled(chunk.vectors["work"], torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, 1.0))
        chunk.subtract("work", group["lr"])


def _moments(g: Tensor, m: Tensor, v: Tensor, step: Tensor, beta1: float, beta2: float, eps: float, out: Tensor) -> None:
    """out ← m̂ / (√v̂ + ε); updates m and v."""
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    step = step.to(sum_dtype(step.device))  # 1 - β2^t is tiny at first
    torch.div(v, 1 - beta2**step, out=out).sqrt_().add_(eps)
    torch.div(m, out, out=out).div_(1 - beta1**step)


def _fused_moments(g: Tensor, m: Tensor, v: Tensor, step: Tensor, beta1: float, beta2: float, eps: float, out: Tensor) -> None:
    """The same in one kernel: a step of Adam from zero with learning rate -1."""
    torch._fused_adamw_(
        [out.zero_()], [g], [m], [v], [], [step], lr=-1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip
