"""optimizer=muon: orthogonalised momentum for the hidden matrices, AdamW for everything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.core.allowed import NamePattern
from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, Momentum, NonNegative, Positive
from drivetrain.core.patterns import check_patterns, matches
from drivetrain.optimizer.base import Implementation, Optimizer, remove_step_wrappers
from drivetrain.optimizer.groups import GroupSettings


@dataclass(kw_only=True, eq=False)
class Muon(Optimizer):
    """Muon for hidden matrices, AdamW for the rest (Jordan et al. 2024): drivetrain.optimizer.algorithms.muon has the formulas.

    Hidden matrices are the weights of linear layers, of convolutions (a kernel is a matrix of out × in·h·w) and of attention's
    input projections, except those of the model's first and last such layer. AdamW updates these two, embeddings, vectors,
    other tensors and what `adamw` matches, at the learning rate `adamw_lr`. `fused` and `foreach` are AdamW's; Muon always
    updates all matrices of one shape at once.
    """

    decays_by_lr = True
    by_parameter = True
    fused_on = ("cpu", "cuda")
    for_whole_weights = True
    lr: Positive = 0.02
    weight_decay: NonNegative = 0.01
    momentum: Momentum = 0.95
    nesterov: bool = True
    scale: Literal["original", "match_rms_adamw"] = "original"
    ns_steps: Count = 5
    adamw_lr: Positive = 3e-3
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    eps: Positive = 1e-8
    adamw: list[NamePattern] = field(default_factory=list)

    def group_settings(self, model: torch.nn.Module) -> GroupSettings:
        names = {name for name, p in model.named_parameters() if p.requires_grad or p.is_meta}  # other ranks train the latter
        check_patterns(names, {"optimizer.adamw": self.adamw})
        hidden = {n for n in hidden_matrices(model) & names if not any(matches(n, pattern) for pattern in self.adamw)}
        if not hidden:
            raise UserError(
                "optimizer=muon finds no weight of a linear layer or convolution between the model's first and last: "
                "set optimizer=adamw, or empty optimizer.adamw"
            )
        return lambda name, decayed: {"matrix": name in hidden}

    def make(self, groups: list[dict[str, Any]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms import chained, muon

        matrices, others = ([_without(g, "matrix") for g in groups if g["matrix"] == matrix] for matrix in (True, False))
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:  # a stage of a pipeline may have none
            settings: dict[str, Any] = {
                "momentum": self.momentum,
                "nesterov": self.nesterov,
                "scale": self.scale,
                "ns_steps": self.ns_steps,
            }
            optimizers.append(muon.Muon(matrices, lr=self.lr, weight_decay=self.weight_decay, **settings))
        if others:
            others = [{**g, "lr": g["lr"] * self.adamw_lr / self.lr} for g in others]
            betas = (self.beta1, self.beta2)
            flags = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
            optimizers.append(torch.optim.AdamW(others, betas=betas, eps=self.eps, **flags))
        for optimizer in optimizers:
            remove_step_wrappers(optimizer)
        return chained.ChainedOptimizer(*optimizers)


def _without(group: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != key}


def hidden_matrices(model: torch.nn.Module) -> set[str]:
    """Names of the weights of linear layers, convolutions and attention's projections, except the first and the last one."""
    nn = torch.nn
    found = []
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            found.append(f"{prefix}.weight".lstrip("."))
        elif isinstance(module, nn.MultiheadAttention):
            found += [f"{prefix}.{name}" for name, p in module.named_parameters(recurse=False) if p.ndim == 2]
    return set(found[1:-1])
