"""optimizer=timm: any optimizer of timm."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.lazy import torch
from drivetrain.core.options.allowed import PLAIN_NAME, Entries, Name
from drivetrain.core.options.option import NonNegative, Positive, RunSpec, needs_extra
from drivetrain.optimizer.base import Implementation, Optimizer

if TYPE_CHECKING:
    from timm.optim import OptimInfo


@dataclass(kw_only=True, eq=False)
class TimmOptimizer(Optimizer):
    """Any optimizer of timm.optim by name, with any of its arguments in `kwargs`. The parameter groups are drivetrain's."""

    decays_by_lr = True
    by_parameter = has_foreach = True
    fused_on = ("cpu", "cuda")  # if the optimizer is torch's: `validate_device` asks the optimizer itself
    lr: Positive = 0.003
    weight_decay: NonNegative = 0.01
    name: Name = "nadamw"
    kwargs: Annotated[dict[str, Any], Entries(PLAIN_NAME)] = field(default_factory=dict)

    @property
    def torch_name(self) -> str | None:  # type: ignore[override]
        of_timm: Any = self._info().opt_class
        return of_timm.__name__ if of_timm.__module__.startswith("torch.") else None

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        if missing := list(needs_extra("timm", "timm", "optimizer=timm")):
            yield from missing
            return
        from timm.optim import list_optimizers

        known = [str(name) for name in list_optimizers(exclude_filters=["fused*", "bnb*"])]
        if self.name.removeprefix("lookahead_") not in known:
            yield f"optimizer.name={self.name} is not an optimizer of timm that runs here: {self._alternative(known)}"
            return
        yield from super().validate_device(run)
        parameters = self._parameters()
        if self._info().second_order:
            yield (
                f"optimizer.name={self.name} needs second derivatives, which training here does not compute: "
                f"{self._alternative([])}"
            )
        for key in self.kwargs.keys() - parameters:
            yield f"optimizer.kwargs.{key}: {self.name} takes no such argument: {did_you_mean(key, parameters)}"
        if not run.parallel.whole_model or run.parallel.shard_optimizer:
            yield from self._coupling_problems(run, parameters)
        for key in ("fused", "foreach"):
            if getattr(self, key) and key not in parameters:
                yield f"optimizer.{key}=true, but timm's {self.name} has no such implementation: set optimizer.{key}=null"

    def _coupling_problems(self, run: RunSpec, parameters: set[str]) -> Iterator[str]:
        """The optimizer's features that need all parameters at once, for ranks that update only some."""
        if "max_grad_norm" in parameters and self.kwargs.get("max_grad_norm", 1.0) is not None:
            yield (
                f"optimizer.name={self.name} takes the norm of all gradients, and {run.named('parallel')} has each rank update "
                "some of the weights: set optimizer.kwargs={max_grad_norm: null} clip=norm, or optimizer=nvlamb"
            )
        if self.name.removeprefix("lookahead_").startswith("kron"):
            yield (
                f"optimizer.name={self.name} draws random numbers weight after weight, and {run.named('parallel')} has each rank "
                "update some of them: set parallel=ddp parallel.shard_optimizer=false"
            )

    def _alternative(self, known: list[str]) -> str:
        """The setting to use instead of the name."""
        if "apex" in self.name or self.name.startswith("fused"):
            return "set optimizer=apex_adam, apex_sgd, apex_lamb or apex_novograd for apex's"
        return did_you_mean(self.name, known) if known else "set optimizer=adamw, say"

    def _info(self) -> OptimInfo:
        from timm.optim import get_optimizer_info

        return get_optimizer_info(self.name.removeprefix("lookahead_"))

    def _parameters(self) -> set[str]:
        """The names of the optimizer's arguments that may be set in `kwargs`."""
        optimizer_class: Any = self._info().opt_class
        set_here = {"self", "params", "lr", "weight_decay", "closure"}
        return set(inspect.signature(optimizer_class).parameters) - set_here

    def make(self, groups: list[dict[str, Any]], implementation: Implementation) -> torch.optim.Optimizer:
        from timm.optim import create_optimizer_v2

        parameters = self._parameters()
        flags: dict[str, Any] = {
            key: implementation == key
            for key in ("fused", "foreach")
            if key in parameters and (implementation == key or getattr(self, key) is not None)
        }
        kwargs = {**flags, **{k: tuple(v) if isinstance(v, list) else v for k, v in self.kwargs.items()}}
        try:
            return create_optimizer_v2(groups, opt=self.name, lr=groups[0]["lr"], **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"optimizer.name={self.name} cannot be built with {self.kwargs}: {error}") from None
