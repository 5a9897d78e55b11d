"""Muon, and several optimizers as one."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Literal

import torch
from torch import Tensor

from drivetrain.optimizer.algorithms.flat import _order

A, B, C = 3.4445, -4.7750, 2.0315  # the quintic's coefficients


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), for each matrix W (rows × columns) with gradient G:

        M ← μ · M + (1 - μ) · G
        W ← W - lr · decay · W - lr · scale · NS(nesterov: (1 - μ) · G + μ · M)

    A convolution's kernel is a matrix of (out, in·h·w). NS makes all singular values about 1, in five steps in bfloat16;
    matrices of one shape are worked on together. `scale` is √max(1, rows / columns), with `match_rms_adamw`
    0.2 · √max(rows, columns) (Liu et al. 2025): the size of AdamW's updates. On matrices it equals torch.optim.Muon, which
    takes no convolutions and works on one matrix at a time.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: Literal["original", "match_rms_adamw"] = "original",
        ns_steps: int = 5,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**defaults, "scale": scale, "ns_steps": ns_steps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            batches: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    if p.grad.is_sparse:
                        raise TypeError("Muon takes no sparse gradients: set sparse=False in the Embedding")
                    batches[len(p), p.numel() // len(p)].append(p)
            for (rows, columns), params in batches.items():
                self._update(params, rows, columns, group)

    def _update(self, params: list[Tensor], rows: int, columns: int, group: dict[str, Any]) -> None:
        for p in params:
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum, buffers = group["momentum"], [self.state[p]["momentum_buffer"] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        # Columns in memory order: a kernel in channels-last order stays a view, and the result is permuted as its argument.
        stacked = torch.stack([_matrix(u, p) for u, p in zip(updates, params, strict=True)])
        matches = group["scale"] == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if matches else math.sqrt(max(1, rows / columns))
        lr = group["lr"]
        matrices = [_matrix(p, p) for p in params]
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
        moves = orthogonalised(stacked, group["ns_steps"]).mul_(-lr * scale).unbind()
        torch._foreach_add_(matrices, list(moves))


def _matrix(tensor: Tensor, like: Tensor) -> Tensor:
    """(out, the rest in `like`'s memory order); a view where that is the tensor's own."""
    order = _order(like)
    if order is not None and order[0] != 0:
        raise ValueError(
            f"Muon: a weight of shape {list(like.shape)} and strides {like.stride()} is no matrix of (out, the rest)"
        )
    return (tensor if order is None else tensor.permute(order)).reshape(len(like), -1)


def orthogonalised(g: Tensor, steps: int) -> Tensor:
    """(n, rows, columns) → the same with singular values of about 1 (0.7 to 1.2), in g's type."""
    x = g.bfloat16()
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return (x.mT if tall else x).to(g.dtype)


class Together(torch.optim.Optimizer):
    """Several optimizers as one; each steps its own parameter groups, which all stand in `param_groups`."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members
        super().__init__([group for member in members for group in member.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for member in self.members for group in member.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of each member."""
        for member in self.members:
            member.step()

    def state_dict(self) -> dict[str, Any]:
        """The members', in order."""
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take `state_dict()` back."""
        for member, state in zip(self.members, state_dict["members"], strict=True):
            member.load_state_dict(state)
        self._share_groups()
