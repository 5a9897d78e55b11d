"""The algorithm: an ordinary torch optimizer, which knows nothing of drivetrain."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT


class SignSgd(torch.optim.Optimizer):
    """Signum (Bernstein et al. 2018): each weight moves by lr, against the sign of its momentum."""

    def __init__(self, params: ParamsT, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                m = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(m.sign(), alpha=group["lr"])
