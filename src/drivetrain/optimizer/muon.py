"""optimizer=muon: orthogonalised momentum for the hidden matrices, AdamW for everything else."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drivetrain.core.errors import UserError, refuse
from drivetrain.core.lazy import torch
from drivetrain.core.machine import torch_patches
from drivetrain.core.options.allowed import NamePattern, check_patterns, matches
from drivetrain.core.options.option import BuildContext, Few, Momentum, NonNegative, Positive
from drivetrain.core.step.architecture import Architecture, Matrix
from drivetrain.core.step.trees import Tree
from drivetrain.optimizer.base import Implementation, Optimizer
from drivetrain.optimizer.groups import GroupSettings, trained_names

SAID = 6  # names in a line
WHAT = {  # kinds of parameters with their own learning rate
    "embedding_lr": "embedding",
    "head_lr": "weight of an output layer that is known as such, and not an embedding's too",
    "scalar_lr": "vector or scalar",
}

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Muon(Optimizer):
    """Muon for hidden matrices, AdamW for the rest (Jordan et al. 2024): drivetrain.optimizer.algorithms.muon has the formulas.

    Hidden matrices are the weights of linear layers, of convolutions (a kernel is a matrix of out × in·h·w), of attention's
    input projections, of recurrent layers, and of each expert in a stack of experts, except the layers that read the inputs or
    give the outputs (core/step/architecture.py). AdamW updates those layers, embeddings, vectors, other tensors and matches of
    `adamw`, at the learning rate `adamw_lr`; in a phase of the updates without a hidden matrix it updates all parameters.
    `embedding_lr`, `head_lr` and `scalar_lr` are the rates of torch's embeddings, of the layers that give the outputs, and of
    vectors and scalars. `fused` and `foreach` are AdamW's; Muon always updates all matrices of one shape together.
    """

    decays_by_lr = True
    by_parameter = has_foreach = True
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
    normalize: Literal["none", "neurons"] = "none"
    normalize_beta: Momentum = 0.95
    cautious_decay: bool = False
    adamw: list[NamePattern] = field(default_factory=list)
    _inputs: Tree = field(default=(), init=False)  # of the model
    _of_phase: bool = field(default=False, init=False)  # True if it updates only the parameters of a phase

    def build(self, context: BuildContext) -> torch.optim.Optimizer:
        self._inputs, self._of_phase = context.example, bool(context.run.values["phases"])
        return super().build(context)

    def check_names(self, trained: Collection[str]) -> None:
        super().check_names(trained)
        check_patterns(trained, {"optimizer.adamw": self.adamw})

    def group_settings(self, model: torch.nn.Module) -> GroupSettings:
        names = trained_names(model)
        parameters = {name: p for name, p in model.named_parameters() if name in names}
        roles = Architecture.of(model, self._inputs, parameters if self._of_phase else None)
        kinds: dict[str, list[str]] = {"embedding_lr": [], "head_lr": [], "scalar_lr": [], "": []}
        for name, p in parameters.items():
            kind = "embedding_lr" if name in roles.embeddings else "head_lr" if name in roles.of_outputs else ""
            kinds[kind or ("scalar_lr" if p.ndim <= 1 else "")].append(name)
        rates = self._own_rates(kinds)
        hidden = {n: roles.hidden[n] for n in kinds[""] if n in roles.hidden and not any(matches(n, p) for p in self.adamw)}
        if not hidden and not self._of_phase:
            raise UserError(
                "optimizer=muon finds no matrix between the layer that reads the inputs and the one that gives the outputs: "
                "set optimizer=adamw, or empty optimizer.adamw"
            )
        logger.info("Muon: %s", _described(kinds, {n: len(parameters[n]) if m.stacked else 1 for n, m in hidden.items()}))
        layout = {name: matrix._asdict() for name, matrix in hidden.items()}
        others = Matrix()._asdict()
        return lambda name, decayed: {
            "matrix": name in hidden,
            **layout.get(name, others),
            "adamw_lr": rates.get(name, self.adamw_lr),
        }

    def _own_rates(self, kinds: Mapping[str, list[str]]) -> dict[str, float]:
        """The learning rates of parameters of kinds with their own rate. Raises UserError for a kind without parameters."""
        given = {kind: rate for kind in WHAT if (rate := getattr(self, kind)) is not None}
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
                    nesterov=self.nesterov, scale=self.scale, ns_steps=self.ns_steps, normalize=self.normalize,
                    normalize_beta=self.normalize_beta, cautious_decay=self.cautious_decay,
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
    own = ("matrix", "adamw_lr", *(() if group["matrix"] else Matrix._fields))
    return {k: v for k, v in group.items() if k not in own}


def _described(kinds: Mapping[str, list[str]], matrices: Mapping[str, int]) -> str:
    """The number of matrices, and AdamW's parameters, such as "24 matrices; AdamW: embedding, head, 50 vectors"."""
    others = [name for name in kinds[""] if name not in matrices]
    named = [name for name in (*kinds["embedding_lr"], *kinds["head_lr"], *others) if not name.endswith("bias")]
    listed = [name.removesuffix(".weight") for name in named[:SAID]] + [f"{len(named) - SAID} more"] * (len(named) > SAID)
    vectors = sum(map(len, kinds.values())) - len(matrices) - len(named)
    return f"{sum(matrices.values())} matrices; AdamW: {', '.join([*listed, f'{vectors} vectors'])}"
