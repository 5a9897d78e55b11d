"""Schedule-free AdamW."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from drivetrain.optimizer.algorithms.flat_optimizer import Chunk, FlatOptimizer


class ScheduleFree(FlatOptimizer):
    """Schedule-Free AdamW (Defazio et al. 2024, algorithm 1): gradients are taken at y, steps are made in z, x averages them.

        v ← β2 · v + (1 - β2) · g²,   u = g / (√(v / (1 - β2^t)) + ε) + decay · y
        z ← z - lr · u
        x ← (1 - c) · x + c · z,      c = lr² / Σ lr²
        y = (1 - β1) · z + β1 · x

    During training the parameters are y. x is computed from y and z when it is needed, so that the memory is AdamW's. y is
    updated directly and not through x, so that using x in between (`averaged`) does not change y, not even by rounding.
    """

    state_vectors = ("z", "exp_avg_sq")
    state_chunk_numbers = ("weight_sum",)

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        loop: bool = False,
    ) -> None:
        self._trained: dict[Tensor, Tensor] = {}  # y of each parameter that is x at present
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, loop)

    def init_state(self, state: dict[str, list[Tensor]], params: list[Tensor]) -> None:
        torch._foreach_copy_(state["z"], [p.detach() for p in params])

    def update(self, chunk: Chunk, group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        y, g, u = chunk.weights(), chunk.grads(), chunk.vectors["work"]
        z, v, total = chunk.vectors["z"], chunk.vectors["exp_avg_sq"], chunk.numbers["weight_sum"]
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        torch.div(v, 1 - beta2 ** chunk.step.to(total.dtype), out=u).sqrt_().add_(group["eps"])
        torch.div(g, u, out=u).add_(y, alpha=group["weight_decay"]).mul_(lr)
        total.add_(lr * lr)
        c = (lr * lr / total.clamp(min=torch.finfo(total.dtype).tiny)).to(y.dtype)
        y.lerp_(z, c).addcmul_(u, beta1 * (1 - c) - 1)
        chunk.write(y)
        z.sub_(u)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Set the parameters to x. On exit, also after an exception, they are y again, bit for bit."""
        updated = [
            (p, self.state[p]["z"], 1 - 1 / g["betas"][0]) for g in self.param_groups for p in g["params"] if p in self.state
        ]
        self._trained = {p: p.detach().clone() for p, _, _ in updated}
        try:
            with torch.no_grad():
                for p, z, weight in updated:
                    p.lerp_(z.to(p.dtype), weight)
            yield
        finally:
            if self._trained:  # none before the first update
                with torch.no_grad():
                    torch._foreach_copy_([p.detach() for p in self._trained], list(self._trained.values()))
            self._trained = {}

    def _parameters(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """torch's, with each parameter's y in its state, since the weights that are saved are x."""
        found, parameters = super().state_dict(), self._parameters()
        trained = {i: self._trained.get(parameters[i]) for i in found["state"]}
        y = {i: parameters[i].detach().clone() if kept is None else kept for i, kept in trained.items()}
        return {**found, "state": {i: {**state, "y": y[i]} for i, state in found["state"].items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict()`, and set the parameters to y."""
        states, parameters = state_dict["state"], self._parameters()
        plain = {i: {key: value for key, value in state.items() if key != "y"} for i, state in states.items()}
        super().load_state_dict({**state_dict, "state": plain})
        for i, state in states.items():
            parameters[i].copy_(state["y"])
