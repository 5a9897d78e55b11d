"""Optimizers of other libraries: timm's by name, NVIDIA apex's fused ones."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.lazy import torch
from drivetrain.core.option import Momentum, NonNegative, Positive, RunSpec
from drivetrain.optimizer.base import Form, Optimizer


@dataclass(kw_only=True, eq=False)
class Timm(Optimizer):
    """Any of timm.optim by name, with any of its arguments in `kwargs`; ours make the groups."""

    fused_on = ("cpu", "cuda")  # where the named one is torch's: `verify` looks
    lr: Positive = 0.003
    weight_decay: NonNegative = 0.01
    name: str = "nadamw"
    kwargs: dict[str, Any] = field(default_factory=dict)

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        from timm.optim import list_optimizers

        yield from super().validate_device(run)
        known: list[Any] = list_optimizers(exclude_filters=["fused*", "bnb*"])
        if self.name.removeprefix("lookahead_") not in known:
            yield f"optimizer.name={self.name} is no optimizer of timm that runs here: {self._instead(known)}"
            return
        info, takes = self._info(), self._takes()
        if info.second_order:
            yield f"optimizer.name={self.name} needs second derivatives, which no step here makes: {self._instead([])}"
        for key in self.kwargs.keys() - takes:
            yield f"optimizer.kwargs.{key}: {self.name} takes no such argument: {did_you_mean(key, takes)}"
        for form in ("fused", "foreach"):
            if getattr(self, form) and form not in takes:
                yield f"optimizer.{form}=true, but timm's {self.name} has no such form: set optimizer.{form}=null"

    def _instead(self, known: list[str]) -> str:
        if "apex" in self.name or self.name.startswith("fused"):
            return "set optimizer=apex_adam, apex_sgd, apex_lamb or apex_novograd for apex's"
        return did_you_mean(self.name, known) if known else "set optimizer=adamw, say"

    def _info(self) -> Any:
        from timm.optim import get_optimizer_info

        return get_optimizer_info(self.name.removeprefix("lookahead_"))

    def _takes(self) -> set[str]:
        ours = {"self", "params", "lr", "weight_decay", "closure"}
        return set(inspect.signature(self._info().opt_class).parameters) - ours

    def make(self, groups: list[dict[str, Any]], form: Form) -> torch.optim.Optimizer:
        from timm.optim import create_optimizer_v2

        takes = self._takes()
        how: dict[str, Any] = {
            f: form == f for f in ("fused", "foreach") if f in takes and (form == f or getattr(self, f) is not None)
        }
        kwargs: dict[str, Any] = {**how, **{k: tuple(v) if isinstance(v, list) else v for k, v in self.kwargs.items()}}
        try:
            return create_optimizer_v2(groups, opt=self.name, lr=groups[0]["lr"], **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"optimizer.name={self.name} cannot be built with {self.kwargs}: {error}") from None


@dataclass(kw_only=True, eq=False)
class Apex(Optimizer):
    """The base of NVIDIA apex's fused optimizers (apex.optimizers), CUDA only."""

    apex_name: ClassVar[str]
    instead: ClassVar[str]  # the nearest option without apex
    fused_on = ("cuda",)
    has_foreach = False

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        name = run.named("optimizer")
        if find_spec("apex") is None:
            yield (
                f"{name} needs NVIDIA's apex, which is not installed (it is built from github.com/NVIDIA/apex): "
                f"set optimizer={self.instead} instead"
            )
        if self.fused is False:
            yield f"optimizer.fused=false, but {name} is nothing else: set optimizer={self.instead} optimizer.fused=false"

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        name = run.named("optimizer")
        if run.runtime.kind() != "cuda":
            yield f"{name} runs on CUDA alone, and this run is on {run.runtime.kind()}: set optimizer={self.instead}"
            return
        try:
            from apex import optimizers
        except ImportError as error:
            yield f"{name}: apex cannot be imported ({error}): set optimizer={self.instead}"
            return
        if not hasattr(optimizers, self.apex_name):
            yield f"{name}: this apex has no optimizers.{self.apex_name}: set optimizer={self.instead}"

    def make(self, groups: list[dict[str, Any]], form: Form) -> torch.optim.Optimizer:
        from apex import optimizers

        return getattr(optimizers, self.apex_name)(groups, lr=groups[0]["lr"], **self.own())


@dataclass(kw_only=True, eq=False)
class ApexAdam(Apex):
    """apex.optimizers.FusedAdam; `adam_w_mode` takes the decay out of the gradient, as AdamW does."""

    apex_name, instead = "FusedAdam", "adamw"
    lr: Positive = 0.003
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8
    adam_w_mode: bool = True


@dataclass(kw_only=True, eq=False)
class ApexSgd(Apex):
    """apex.optimizers.FusedSGD."""

    apex_name, instead = "FusedSGD", "sgd"
    lr: Positive = 0.1
    weight_decay: NonNegative = 5e-4
    momentum: Momentum = 0.9
    nesterov: bool = True


@dataclass(kw_only=True, eq=False)
class ApexLamb(Apex):
    """apex.optimizers.FusedLAMB; with `use_nvlamb` what does not decay is adapted too."""

    apex_name, instead = "FusedLAMB", "nvlamb"
    lr: Positive = 0.02
    weight_decay: NonNegative = 0.01
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-6
    max_grad_norm: Positive = 1.0
    use_nvlamb: bool = False


@dataclass(kw_only=True, eq=False)
class ApexNovoGrad(Apex):
    """apex.optimizers.FusedNovoGrad; its second moment starts at the first gradient's norm (`init_zero`: at zero)."""

    apex_name, instead = "FusedNovoGrad", "novograd"
    lr: Positive = 0.02
    weight_decay: NonNegative = 1e-3
    beta1: Momentum = 0.95
    beta2: Momentum = 0.98
    eps: Positive = 1e-8
    grad_averaging: bool = False
    init_zero: bool = False
