"""optimizer=muon: orthogonalised momentum for the hidden matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.core.errors import UserError, refuse
from drivetrain.core.lazy import torch
from drivetrain.core.machine import torch_patches
from drivetrain.core.options.allowed import NamePattern, check_patterns, matches
from drivetrain.core.options.option import BuildContext, Few, Momentum, NonNegative, Positive
from drivetrain.optimizer.base import Implementation, Optimizer
from drivetrain.optimizer.groups import GroupSettings, trained_names

WHAT = {  # parameters with a learning rate of their own
    "embedding_lr": "embedding",
    "head_lr": "weight of an output layer that is known as such, and not an embedding's too",
    "scalar_lr": "vector or scalar",
}


@dataclass(kw_only=True, eq=False)
class Muon(Optimizer):
    """Muon for hidden matrices, AdamW for the rest (Jordan et al. 2024): drivetrain.optimizer.algorithms.muon has the formulas.

    Hidden matrices are the weights of linear layers, of convolutions (a kernel is a matrix of out × in·h·w) and of attention's
    input projections, except those of the model's first and last such layer. AdamW updates these two, embeddings, vectors,
    other tensors and what `adamw` matches, at the learning rate `adamw_lr`. `embedding_lr`, `head_lr` and `scalar_lr` are those
    of torch's embeddings, of the layers that give the outputs, and of vectors and scalars, each in this order. `fused` and
    `foreach` are AdamW's; Muon always updates all matrices of one shape at once.
    """

    decays_by_lr = True
    by_parameter = True
    fused_on, torch_name = ("cpu", "cuda"), "AdamW"
    for_whole_weights = True
    lr: Positive = 0.02
    weight_decay: NonNegative = 0.01
    momentum: Momentum = 0.95
    nesterov: bool = True
    scale: Literal["original", "match_rms_adamw"] = "original"
    ns_steps: Few = 5
    adamw_lr: Positive = 3e-3
    embedding_lr: Positive | None = None
    head_lr: Positive | None = None
    scalar_lr: Positive | None = None
    beta1: Momentum = 0.9
    beta2: Momentum = 0.95
    eps: Positive = 1e-8
    adamw: list[NamePattern] = field(default_factory=list)
    _heads: Sequence[str] = field(default=(), init=False)  # names of the layers that give the outputs

    def build(self, context: BuildContext) -> torch.optim.Optimizer:
        self._heads = context.run.model.output_layers(context.model)
        return super().build(context)

    def check_names(self, trained: Collection[str]) -> None:
        super().check_names(trained)
        check_patterns(trained, {"optimizer.adamw": self.adamw})

    def group_settings(self, model: torch.nn.Module) -> GroupSettings:
        names = trained_names(model)
        rates = self._own_rates(model, names)
        hidden = {n for n in hidden_matrices(model) & names - rates.keys() if not any(matches(n, p) for p in self.adamw)}
        if not hidden:
            raise UserError(
                "optimizer=muon finds no weight of a linear layer or convolution between the model's first and last: "
                "set optimizer=adamw, or empty optimizer.adamw"
            )
        return lambda name, decayed: {"matrix": name in hidden, "adamw_lr": rates.get(name, self.adamw_lr)}

    def _own_rates(self, model: torch.nn.Module, names: set[str]) -> dict[str, float]:
        """The learning rates of the parameters of a kind that has its own. Raises UserError for a kind without parameters."""
        nn = torch.nn
        tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        embeddings = {id(p) for table in tables for p in table.parameters(recurse=False)}
        heads = {id(p) for name in self._heads for p in model.get_submodule(name).parameters()}
        kinds: dict[str, list[str]] = {"embedding_lr": [], "head_lr": [], "scalar_lr": []}
        for name, p in model.named_parameters():
            kind = "embedding_lr" if id(p) in embeddings else "head_lr" if id(p) in heads else "scalar_lr"
            if name in names and (p.ndim <= 1 or kind != "scalar_lr"):
                kinds[kind].append(name)
        given = {kind: rate for kind in kinds if (rate := getattr(self, kind)) is not None}
        refuse(
            f"optimizer.{kind}={rate}: the model has no trainable {WHAT[kind]}: set optimizer.{kind}=null"
            for kind, rate in given.items()
            if not kinds[kind]
        )
        return {name: rate for kind, rate in given.items() for name in kinds[kind]}

    def make(self, groups: list[dict[str, Any]], implementation: Implementation) -> torch.optim.Optimizer:
        from drivetrain.optimizer.algorithms import muon

        matrices, others = ([g for g in groups if g["matrix"] == matrix] for matrix in (True, False))
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:  # a stage of a pipeline may have none
            optimizers.append(
                muon.Muon(
                    [_plain(g) for g in matrices], lr=self.lr, weight_decay=self.weight_decay, momentum=self.momentum,
                    nesterov=self.nesterov, scale=self.scale, ns_steps=self.ns_steps,
                )
            )  # fmt: skip
        if others:
            others = [{**_plain(g), "lr": g["lr"] * g["adamw_lr"] / self.lr} for g in others]
            betas = (self.beta1, self.beta2)
            flags = {"fused": implementation == "fused", "foreach": implementation == "foreach"}
            optimizers.append(torch.optim.AdamW(others, betas=betas, eps=self.eps, **flags))
        for optimizer in optimizers:
            torch_patches.remove_step_wrappers(optimizer)
        return muon.ChainedOptimizer(*optimizers)


def _plain(group: dict[str, object]) -> dict[str, Any]:
    """The group without this option's own settings."""
    return {k: v for k, v in group.items() if k not in ("matrix", "adamw_lr")}


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
