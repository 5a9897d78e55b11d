"""Muon."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from drivetrain.core.typed import StateDict
from drivetrain.optimizer.algorithms.flat_optimizer import memory_order
from drivetrain.saving.sharded_checkpoint import by_name

EPS = 1e-10
A, B, C = 3.4445, -4.7750, 2.0315  # coefficients of the quintic iteration


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), for each matrix W (rows × columns) with gradient G:

        M ← μ · M + (1 - μ) · G
        W ← W - lr · decay · W - lr · scale · NS(nesterov: (1 - μ) · G + μ · M)

    A convolution's kernel is a matrix of (out, in·h·w); a group may be `stacked`, (n, rows, columns), or `transposed`: its
    columns are the outputs, and count as rows for the scale. NS, `ns_steps` Newton-Schulz iterations in bfloat16, makes all
    singular values about 1. Matrices of one shape and device are updated together. The scale is √max(1, rows / columns); with
    `match_rms_adamw` it is 0.2 · √max(rows, columns), which gives updates the size of AdamW's (Liu et al. 2025). On matrices
    this equals torch.optim.Muon, which takes no convolutions and works on one matrix at a time.

    With `normalize` "neurons" NS's result O is divided by the root of a running mean, v ← β v + (1 - β) · mean(O²), of each
    output's own row, and then rescaled to the norm of O (Li et al. 2025, NorMuon). With `cautious_decay` only those elements
    decay that the update also moves towards zero (Chen et al. 2025).
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        scale: Literal["original", "match_rms_adamw"],
        ns_steps: int,
        normalize: Literal["none", "neurons"],
        normalize_beta: float,
        cautious_decay: bool,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        layout = {"stacked": False, "transposed": False}
        variant = {"normalize": normalize, "normalize_beta": normalize_beta, "cautious_decay": cautious_decay}
        super().__init__(params, {**defaults, **layout, **variant, "scale": scale, "ns_steps": ns_steps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices."""
        for group in self.param_groups:
            batches: dict[tuple[int, int, torch.device], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    if p.grad.is_sparse:
                        raise TypeError("Muon takes no sparse gradients: set sparse=False in the Embedding")
                    rows = p.shape[-2] if group["stacked"] else len(p)
                    batches[rows, p.shape[-1] if group["stacked"] else p.numel() // rows, p.device].append(p)
            for (rows, columns, _), params in batches.items():
                self._update(params, rows, columns, group)

    def _update(self, params: list[Tensor], rows: int, columns: int, group: dict[str, Any]) -> None:
        for p in params:
            if p not in self.state:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum, buffers = group["momentum"], [self.state[p]["momentum_buffer"] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        # Columns are in memory order, so that the matrix of a channels-last kernel is a view. A permutation of the columns
        # commutes with NS.
        matrices = [p if group["stacked"] else _matrix(p, p)[None] for p in params]
        joined = torch.cat([u if group["stacked"] else _matrix(u, p)[None] for u, p in zip(updates, params, strict=True)])
        matches = group["scale"] == "match_rms_adamw"
        ratio = columns / rows if group["transposed"] else rows / columns
        scale = 0.2 * math.sqrt(max(rows, columns)) if matches else math.sqrt(max(1, ratio))
        lr, sizes = group["lr"], [len(m) for m in matrices]
        directions = orthogonalised(joined, group["ns_steps"])
        if group["normalize"] == "neurons":
            directions = self._by_neuron(directions, params, sizes, 1 if group["transposed"] else 2, group["normalize_beta"])
        moves = list(directions.mul_(-lr * scale).split(sizes))
        kept = 1 - lr * group["weight_decay"]
        if group["cautious_decay"]:
            decayed = [torch.where(move * m <= 0, m * kept, m) for move, m in zip(moves, matrices, strict=True)]
            torch._foreach_copy_(matrices, decayed)
        else:
            torch._foreach_mul_(matrices, kept)
        torch._foreach_add_(matrices, moves)

    def _by_neuron(self, directions: Tensor, params: list[Tensor], sizes: list[int], inputs: int, beta: float) -> Tensor:
        """(n, rows, columns) → each output's row divided by the root of its running mean square; a matrix keeps its norm.

        `inputs` is the dimension of the inputs.
        """
        squares = directions.square().mean(inputs, keepdim=True)
        for p, own in zip(params, squares.split(sizes), strict=True):
            if "neuron_squares" not in self.state[p]:
                self.state[p]["neuron_squares"] = torch.zeros_like(own)
        kept = [self.state[p]["neuron_squares"] for p in params]
        torch._foreach_lerp_(kept, list(squares.split(sizes)), 1 - beta)
        made = directions / torch.cat(kept).sqrt().add_(EPS)
        return made.mul_(directions.norm(dim=(1, 2), keepdim=True) / made.norm(dim=(1, 2), keepdim=True).add_(EPS))


def _matrix(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor as (out, the rest in the memory order of `like`): a view if it already has that order."""
    order = memory_order(like)
    if order is not None and order[0] != 0:
        raise ValueError(
            f"Muon: a weight of shape {list(like.shape)} and strides {like.stride()} is no matrix of (out, the rest)"
        )
    return (tensor if order is None else tensor.permute(order)).reshape(len(like), -1)


def orthogonalised(g: Tensor, steps: int) -> Tensor:
    """(n, rows, columns) → matrices with the same singular vectors and singular values of about 1 (0.7 to 1.2), in g's dtype."""
    x = g.bfloat16()
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return (x.mT if tall else x).to(g.dtype)


class ChainedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one. Each updates its own parameter groups; `param_groups` has the groups of all."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members
        super().__init__([group for member in members for group in member.param_groups], {})
        self.defaults = {key: value for member in members for key, value in member.defaults.items()}
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for member in self.members for group in member.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each member."""
        for member in self.members:
            member.step()

    def state_dict(self) -> StateDict:
        """The state of all members, in the form of one optimizer's."""
        parts = [by_name(member.state_dict()) for member in self.members]
        states = {name: state for part in parts for name, state in part["state"].items()}
        return {"state": states, "param_groups": [group for part in parts for group in part["param_groups"]]}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load `state_dict()`."""
        groups, states = iter(state_dict["param_groups"]), state_dict["state"]
        for member in self.members:
            own = list(itertools.islice(groups, len(member.param_groups)))
            held = {name: states[name] for group in own for name in group["params"] if name in states}
            member.load_state_dict({"state": held, "param_groups": own})
        self._share_groups()
