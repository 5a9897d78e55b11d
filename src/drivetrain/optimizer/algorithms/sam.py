"""Sharpness-aware minimization around torch's SGD."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Sam(torch.optim.SGD):
    """w ← SGD(w, ∇L(w + ε)) with ε = rho · ∇L(w) / ‖∇L(w)‖; with `adaptive` ε = rho · w² ∇L(w) / ‖w ∇L(w)‖."""

    def __init__(self, params: ParamsT, *, rho: float, adaptive: bool, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.rho, self.adaptive = rho, adaptive

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        """Run the closure at the weights and at w + ε, then update by the second gradient."""
        loss = closure()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        steps = [p.grad * p.abs() if self.adaptive else p.grad for p in moved]
        scale = self.rho / (torch.nn.utils.get_total_norm(steps) + 1e-12)
        before = [p.clone() for p in moved]
        for p, step in zip(moved, steps, strict=True):
            p.add_(step * p.abs() * scale if self.adaptive else step * scale)
        closure()
        torch._foreach_copy_(moved, before)
        inspect.unwrap(torch.optim.SGD.step)(self)
        return loss
