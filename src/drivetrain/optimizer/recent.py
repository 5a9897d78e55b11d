"""Muon, Lion and schedule-free AdamW (drivetrain.optimizer.algorithms)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt, Lt

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.option import Count, Momentum, NonNegative, Positive, RunSpec
from drivetrain.optimizer.base import Form, Optimizer, eager_step
from drivetrain.optimizer.groups import matches, unmatched


@dataclass(kw_only=True, eq=False)
class Muon(Optimizer):
    """Muon for the hidden matrices, AdamW for the rest (Jordan et al. 2024): algorithms/muon.py states the rules.

    Hidden are the weights of linear layers and convolutions (a kernel as a matrix of out × in·h·w) and attention's input
    projections, but for the model's first and last such layer. AdamW takes those two, embeddings, vectors, other tensors and
    what `adamw` matches, at `adamw_lr`. `fused` and `foreach` are AdamW's; Muon works on all matrices of a shape at once.
    """

    fused_on = ("cpu", "cuda")
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
    adamw: list[str] = field(default_factory=list)

    def tags(self, model: torch.nn.Module) -> Any:
        named = {name for name, p in model.named_parameters() if p.requires_grad}
        unmatched(dict.fromkeys(named), {"optimizer.adamw": self.adamw})
        hidden = {n for n in hidden_matrices(model) & named if not any(matches(n, pattern) for pattern in self.adamw)}
        if not hidden:
            raise UserError(
                "optimizer=muon finds no weight of a linear layer or convolution between the model's first and last: "
                "set optimizer=adamw, or empty optimizer.adamw"
            )
        return lambda name, decayed: {"matrix": name in hidden}

    def make(self, groups: list[dict[str, Any]], form: Form) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms import muon

        ours = [{k: v for k, v in g.items() if k != "matrix"} for g in groups if g["matrix"]]
        rest = [
            {**{k: v for k, v in g.items() if k != "matrix"}, "lr": g["lr"] * self.adamw_lr / self.lr}
            for g in groups
            if not g["matrix"]
        ]
        members: list[torch.optim.Optimizer] = [
            muon.Muon(ours, momentum=self.momentum, nesterov=self.nesterov, scale=self.scale, ns_steps=self.ns_steps)
        ]
        if rest:
            betas = (self.beta1, self.beta2)
            how = {"fused": form == "fused", "foreach": form == "foreach"}
            members.append(torch.optim.AdamW(rest, betas=betas, eps=self.eps, **how))
        for member in members:
            eager_step(member)
        return muon.Together(*members)


def hidden_matrices(model: torch.nn.Module) -> set[str]:
    """Names of the weights of linear layers, convolutions and attention's projections, without the first and last one."""
    nn = torch.nn
    found = []
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            found.append(f"{prefix}.weight".lstrip("."))
        elif isinstance(module, nn.MultiheadAttention):
            found += [f"{prefix}.{name}" for name, p in module.named_parameters(recurse=False) if p.ndim == 2]
    return set(found[1:-1])


@dataclass(kw_only=True, eq=False)
class Lion(Optimizer):
    """Evolved sign momentum (Chen et al. 2023): drivetrain.optimizer.algorithms.lion states the rules."""

    elementwise = True
    in_chunks = True
    lr: Positive = 0.001
    weight_decay: NonNegative = 0.1
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99

    def make(self, groups: list[dict[str, Any]], form: Form) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms.lion import Lion

        return Lion(groups, loop=form == "loop", **self.own())


@dataclass(kw_only=True, eq=False)
class ScheduleFree(Optimizer):
    """Schedule-free AdamW (Defazio et al. 2024): drivetrain.optimizer.algorithms.schedulefree states the rules.

    Evaluated and saved are the averaged weights; BatchNorm's running statistics stay those of the trained ones.
    """

    in_chunks = True
    lr: Positive = 2.5e-3
    weight_decay: NonNegative = 0.01
    beta1: Annotated[float, Gt(0), Lt(1)] = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not run.scheduler.constant:
            yield (
                f"{run.named('optimizer')} averages the weights where others lower the learning rate, and wants it to rise "
                f"or stay, but {run.named('scheduler')} lowers it: set scheduler=constant, with scheduler.warmup as you like"
            )

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.ema.active:
            yield f"{run.named('optimizer')} evaluates an average already: {run.named('ema')} averages what is trained"

    def make(self, groups: list[dict[str, Any]], form: Form) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms.schedulefree import ScheduleFree

        return ScheduleFree(groups, loop=form == "loop", **self.own())

    def eval_weights(self) -> AbstractContextManager[None]:
        return self.optimizer.averaged()  # type: ignore[attr-defined]
