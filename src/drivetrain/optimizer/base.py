"""The base of every optimizer option: parameter groups, the implementation, and a step without torch's wrappers."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine import torch_patches
from drivetrain.core.options.allowed import check_patterns, flatten
from drivetrain.core.options.option import BuildContext, Effect, RunSpec
from drivetrain.core.step import low_rank
from drivetrain.core.step.architecture import sparse_parameters
from drivetrain.optimizer.groups import GroupSettings, Hyperparameters, parameter_groups, trained_names

Implementation = Literal["fused", "foreach", "loop"]
# Parameters' elements. On a CPU, a larger model's tensors leave the cache between two multi-tensor operations, which makes
# those slower than the loop.
CPU_CACHE = 1 << 20


@dataclass(kw_only=True, eq=False)
class Optimizer(Hyperparameters):
    """An option that builds an optimizer over a model's parameters.

    torch's three implementations: `fused` (one kernel for everything), `foreach` (each operation on many parameters at
    once) and the loop over the parameters (both false). null selects the fastest one: fused if it exists, else
    foreach, else the loop. A subclass has its further hyperparameters as fields and makes the optimizer in `make`.
    """

    effect: ClassVar[Effect] = "changes"
    changes = "how gradients become updates"
    key_effects: ClassVar[Mapping[str, Effect]] = {"fused": "close", "foreach": "close"}
    fused_on: ClassVar[tuple[str, ...]] = ()  # device types that are known to have a fused implementation
    torch_name: ClassVar[str | None] = None  # the class of torch.optim whose fused implementation it uses; None: its own, or none
    has_foreach: ClassVar[bool] = False
    in_chunks: ClassVar[bool] = False  # True if its foreach implementation works on chunks that fit a CPU's cache

    def resolve(self, run: RunSpec) -> Self:
        ratio = run.adapter.lr_ratio
        return self if ratio == 1 else self.with_values(lr_multipliers={**self.lr_multipliers, low_rank.FACTOR: ratio})

    def validate(self, run: RunSpec) -> Iterator[str]:
        name = run.named("optimizer")
        if self.fused and self.foreach:
            yield "optimizer.fused=true and optimizer.foreach=true exclude each other: set one of them to null"
        elif self.fused and not self.fused_on:
            yield f"optimizer.fused=true, but {name} has no fused implementation: set optimizer.fused=null to use the fastest"
        elif self.foreach and not self.has_foreach:
            yield f"optimizer.foreach=true, but {name} has no multi-tensor implementation: set optimizer.foreach=null"
        if self.final_weight_decay is not None and not self.weight_decay:
            yield (
                f"optimizer.final_weight_decay={self.final_weight_decay:g} scales optimizer.weight_decay, which is 0: set it to "
                "a small number"
            )
        if self.final_weight_decay is not None and run.compile.captures_step:
            yield (
                "optimizer.final_weight_decay and compile=step exclude each other (its graph keeps the weight decay): set it to "
                "null, or compile=inductor"
            )
        if self.takes_closure:
            yield from self._closure_problems(run)
        yield from self._lr_multiplier_problems()

    def _closure_problems(self, run: RunSpec) -> Iterator[str]:
        """Yield the settings that exclude further forwards and backwards within an update."""
        excluded = {
            "precision": (run.precision.scales_loss or run.precision.owns_weights, "set precision=bf16"),
            "compile": (run.compile.captures_step, "set compile=inductor"),
            "parallel": (not run.parallel.calls_parts, "set parallel=ddp"),
            "batch": (bool(run.batch.untried) or run.batch.preallocate, "set batch=accumulate batch.preallocate=false"),
        }
        for group, (is_so, remedy) in excluded.items():
            if is_so:
                yield (
                    f"{run.named('optimizer')} and {run.named(group)} exclude each other (it runs an update's forward and "
                    f"backward several times): {remedy}"
                )

    def _lr_multiplier_problems(self) -> Iterator[str]:
        multipliers = flatten(self.lr_multipliers)
        for pattern, multiplier in multipliers.items():
            if isinstance(multiplier, bool) or not isinstance(multiplier, int | float) or not multiplier > 0:
                instead = f": to keep {pattern} as it is, set model.freeze=[{pattern}]" if multiplier == 0 else ""
                yield (
                    f"optimizer.lr_multipliers: {pattern}={multiplier}: a multiplier of the learning rate must be a number > 0"
                    f"{instead}"
                )
            if "[" in pattern:
                yield f"optimizer.lr_multipliers: {pattern!r}: a pattern may have * and ?, but no brackets"
            inner = [other for other in multipliers if other.startswith(f"{pattern}.")]
            if inner:  # a recipe writes nested keys and could not hold both
                yield (
                    f"optimizer.lr_multipliers: {pattern} contains {inner[0]}, so that one key would be both a number and a "
                    f"mapping: write '{pattern}.*' for the outer one"
                )

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        kind = run.runtime.device_type()
        if self.fused and self.fused_on and not self.has_fused(kind):
            name = run.named("optimizer")
            yield f"optimizer.fused=true: {name} has no fused implementation on {kind}: set optimizer.fused=null"

    def build(self, context: BuildContext) -> torch.optim.Optimizer:
        """The optimizer over the run's model, with the learning rate and the weight decay for its batch."""
        by_owners = self.by_parameter or context.parallel.shard_optimizer
        with context.parallel.whole_parameters(context.model) if by_owners else nullcontext():
            optimizer = self.create(context.model, context.batch.lr_factor(), context.batch.decay_factor())
        if self.by_norms:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            sums = context.parallel.layer_sums(parameters) or (None if context.parallel.own_forward else list)
            if sums is not None or context.parallel.shard_optimizer:
                optimizer.set_shards(sums, context.parallel.norm)  # type: ignore[attr-defined]
        return optimizer

    def create(self, model: torch.nn.Module, lr_factor: float = 1.0, decay_factor: float = 1.0) -> torch.optim.Optimizer:
        """The optimizer over the model's trainable parameters, with `lr` × `lr_factor` and `weight_decay` × `decay_factor`."""
        self.check_names(trained_names(model))
        groups = parameter_groups(model, self, self.lr * lr_factor, self.group_settings(model))
        for group in groups:
            group["weight_decay"] *= decay_factor
        parameters = [p for g in groups for p in g["params"]]
        torch_patches.keep_compiler_unimported()
        here = next((p for p in parameters if not p.is_meta), parameters[0])  # another rank updates these
        sparse, chosen = sparse_parameters(model), self.fused is not None or self.foreach is not None
        # No other implementation takes sparse gradients, and torch's fused ones no complex weights.
        loop = (bool(sparse) or any(p.is_complex() for p in parameters)) and not chosen
        implementation = "loop" if loop else self.implementation(here.device.type, sum(p.numel() for p in parameters))
        for group in groups:
            self._try_sparse([sparse[id(p)] for p in group["params"] if id(p) in sparse], group, implementation)
        optimizer = self.make(groups, implementation)
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty and not self.takes_closure:
            raise UserError(
                f"{type(optimizer).__name__} updates by a closure: set takes_closure = True in {type(self).__name__}, "
                "the class of the option"
            )
        names = {id(p): name for name, p in model.named_parameters()}
        for group in optimizer.param_groups:  # saved with the state, so that it can be matched to parameters
            group["param_names"] = [names[id(p)] for p in group["params"]]
        torch_patches.remove_step_wrappers(optimizer)
        return optimizer

    def _try_sparse(self, names: Sequence[str], group: Mapping[str, object], implementation: Implementation) -> None:
        """Raise UserError if the optimizer, with this group's settings, does not take sparse gradients."""
        if not names:
            return
        p = torch.nn.Parameter(torch.zeros(2, 2))
        p.grad = torch.ones(2, 2).to_sparse(1)
        optimizer = self.make([{**group, "params": [p]}], implementation)
        try:
            optimizer.step(lambda: 0.0) if self.takes_closure else optimizer.step()
        except Exception as error:  # each optimizer raises its own kind of error
            reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0]
            raise UserError(
                f"{names[0]} has sparse gradients, and {type(optimizer).__name__} with these settings does not take them "
                f"({reason}): set sparse=False in the Embedding, or optimizer=sgd optimizer.no_weight_decay=[{names[0]}]"
            ) from None

    def check_names(self, trained: Collection[str]) -> None:
        """Raise UserError for every pattern in the settings that matches no trained parameter by name."""
        multipliers = flatten(self.lr_multipliers)
        check_patterns(
            trained, {"optimizer.no_weight_decay": self.no_weight_decay, "optimizer.lr_multipliers": list(multipliers)}
        )

    def make(self, groups: list[dict[str, object]], implementation: Implementation) -> torch.optim.Optimizer:
        """The optimizer over these parameter groups, each with its own lr and weight_decay."""
        raise self.unwritten("make")

    def group_settings(self, model: torch.nn.Module) -> GroupSettings:
        """A function from a parameter's name, and whether it decays, to the further settings of its group."""
        return lambda name, decayed: {}

    def has_fused(self, device: str) -> bool:
        """True if there is a fused implementation on this device type."""
        if device not in self.fused_on or self.torch_name is None:
            return device in self.fused_on
        from drivetrain.optimizer import torch_wrappers

        return torch_wrappers.has_fused(self.torch_name, device)

    def implementation(self, device: str, elements: int) -> Implementation:
        """The implementation for a model of this size on this device type."""
        if self.fused or (self.fused is None and not self.foreach and self.has_fused(device)):
            return "fused"
        cached = device != "cpu" or self.in_chunks or elements <= CPU_CACHE
        if self.foreach or (self.foreach is None and self.has_foreach and cached):
            return "foreach"
        return "loop"

    def arguments(self) -> dict[str, Any]:
        """The hyperparameters as arguments of an optimizer class: beta1 and beta2 become betas.

        Each parameter group has its own lr and weight_decay; those that are given here are only the class's defaults.
        """
        common = {f.name for f in fields(Hyperparameters)} - {"lr", "weight_decay"}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}
        if "beta2" in values:
            values["betas"] = (float(values.pop("beta1")), float(values.pop("beta2")))  # torch refuses the 0 of beta1=0
        return values

    def eval_weights(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """A context in which the model has the weights to evaluate and to save: here the trained ones."""
        return nullcontext()
