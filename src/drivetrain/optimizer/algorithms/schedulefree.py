"""Schedule-free AdamW."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from drivetrain.optimizer.algorithms.flat import Chunk, Flat


class ScheduleFree(Flat):
    """Schedule-Free AdamW (Defazio et al. 2024, algorithm 1): gradients at y, steps of z, and x, their average, is the result.

        v ← β2 · v + (1 - β2) · g²,   u = g / (√(v / (1 - β2^t)) + ε) + decay · y
        z ← z - lr · u
        x ← (1 - c) · x + c · z,      c = lr² / Σ lr²
        y = (1 - β1) · z + β1 · x

    The parameters are y while training; x is not kept but follows from y and z, so that memory is AdamW's. y moves by
    its own difference, never through x: looking at x (`averaged`) does not disturb the run by a rounding.
    """

    kept = ("z", "exp_avg_sq")
    kept_per_chunk = ("weight_sum",)

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        loop: bool = False,
    ) -> None:
        self._trained: list[Tensor] | None = None  # y, while x stands in the parameters
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, loop)

    def begin(self, state: dict[str, list[Tensor]], params: list[Tensor]) -> None:
        torch._foreach_copy_(state["z"], [p.detach() for p in params])

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        y, g, u = chunk.weights(), chunk.grads(), chunk.vectors["work"]
        z, v, total = chunk.vectors["z"], chunk.vectors["exp_avg_sq"], chunk.numbers["weight_sum"]
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.div(v, 1 - beta2 ** chunk.step.double(), out=u).sqrt_().add_(group["eps"])
        torch.div(g, u, out=u).add_(y, alpha=group["weight_decay"]).mul_(lr)
        total.add_(lr * lr)
        c = (lr * lr / total.clamp(min=torch.finfo(torch.float64).tiny)).to(y.dtype)
        y.lerp_(z, c).addcmul_(u, beta1 * (1 - c) - 1)
        chunk.write(y)
        z.sub_(u)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """x stands in the parameters; y comes back bit for bit, on an exception too."""
        moved = [
            (p, self.state[p]["z"], 1 - 1 / g["betas"][0]) for g in self.param_groups for p in g["params"] if p in self.state
        ]
        self._trained = [p.detach().clone() for p in self._parameters()]
        try:
            with torch.no_grad():
                for p, z, weight in moved:
                    p.lerp_(z.to(p.dtype), weight)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([p.detach() for p in self._parameters()], self._trained)
            self._trained = None

    def _parameters(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """torch's, with y: the model's weights are saved as x."""
        return {**super().state_dict(), "y": self._trained or [p.detach().clone() for p in self._parameters()]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take `state_dict()` back, y too."""
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        for p, y in zip(self._parameters(), state_dict["y"], strict=True):
            p.copy_(y)
