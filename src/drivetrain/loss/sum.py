"""Several losses added up: loss=[a,b]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

from drivetrain.core.lazy import torch
from drivetrain.core.options.option import BuildContext, NonNegative, RunSpec
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.trees import Forward, Tree
from drivetrain.loss.base import Loss, PartedLoss


class Sum(PartedLoss):
    """Adds several losses, each times its weight; each is averaged over its own items and logged as loss_<name>.

    An evaluation reports the weighted sum as `loss`, each part as `loss_<name>`, and the other metrics of the parts.
    """

    def __init__(self, parts: dict[str, Any] | None = None, weights: list[NonNegative] | None = None) -> None:
        super().__init__()
        losses: dict[str, Loss] = parts or {}
        self.losses = {name: loss.with_values(target_key=f"loss.{name}") for name, loss in losses.items()}
        self.weights = weights

    @property
    def machine_local_keys(self) -> tuple[str, ...]:  # type: ignore[override]
        """The losses' machine-local keys, below their names."""
        return tuple(f"{name}.{key}" for name, loss in self.losses.items() for key in loss.machine_local_keys)

    @property
    def takes(self) -> tuple[TargetKind, ...]:  # type: ignore[override]
        """The kinds of targets that all of the losses take."""
        first, *others = self.losses.values()
        return tuple(kind for kind in first.takes if all(kind in other.takes for other in others))

    @property
    def soft_targets(self) -> bool:  # type: ignore[override]
        """True if all of the losses take probabilities of classes."""
        return all(loss.soft_targets for loss in self.losses.values())

    @property
    def takes_trees(self) -> bool:  # type: ignore[override]
        """True if all of the losses take trees of targets."""
        return all(loss.takes_trees for loss in self.losses.values())

    @property
    def takes_whole(self) -> bool:  # type: ignore[override]
        """True if one of the losses takes the model's whole return value; the others then get the part."""
        return any(loss.takes_whole for loss in self.losses.values())

    @property
    def factors(self) -> list[float]:
        """The factor of each loss in the sum."""
        return self.weights if self.weights is not None else [1.0] * len(self.losses)

    def resolve(self, run: RunSpec) -> Self:
        losses = {name: loss.returned("resolve", loss.resolve(run)) for name, loss in self.losses.items()}
        main = next(iter(losses.values()))
        best = ("loss", min) if main.best[0] == "loss" else main.best
        # A name that several parts report belongs to the first one.
        shown = {name: None for loss in losses.values() for name in loss.metrics if name != "loss"}
        return self.with_values(losses=losses, best=best, metrics=("loss", *(f"loss_{name}" for name in losses), *shown))

    def validate(self, run: RunSpec) -> Iterator[str]:
        if self.weights is not None and len(self.weights) != len(self.losses):
            yield (
                f"loss.weights={self.weights} has {len(self.weights)} weights for the {len(self.losses)} losses of "
                f"{run.named('loss')}: give one for each, in their order"
            )
        if not self.takes:
            yield f"{run.named('loss')}: these losses take different kinds of targets: leave one out"
            return
        for name, loss in self.losses.items():
            if loss.compares_samples:
                yield f"{run.named('loss')}: {name} is computed from the whole batch at once, and cannot be added to others"
            if loss.masks_tokens:
                yield f"{run.named('loss')}: {name} hides what the others would take as targets, and cannot be added to them"
        problems = [problem for loss in self.losses.values() for problem in loss.returned("validate", loss.validate(run))]
        yield from dict.fromkeys(problems)

    def advise(self, run: RunSpec) -> Iterator[str]:
        for loss in self.losses.values():
            yield from loss.returned("advise", loss.advise(run))

    def validate_device(self, run: RunSpec) -> Iterator[str]:
        for loss in self.losses.values():
            yield from loss.returned("validate_device", loss.validate_device(run))

    def setup(self, context: BuildContext) -> None:
        self.begin(context.device, *self.losses)
        self._context = context
        for loss in self.losses.values():
            loss.setup(context)

    def add_parameters(self, model: torch.nn.Module) -> None:
        for loss in self.losses.values():
            loss.add_parameters(model)

    def keeps(self) -> dict[str, object]:
        return {name: kept for loss in self.losses.values() for name, kept in loss.keeps().items()}

    def outputs(self, classes: int) -> int:
        return max(loss.outputs(classes) for loss in self.losses.values())

    def problem(self, target: object, classes: int) -> str | None:
        return next((p for loss in self.losses.values() if (p := loss.problem(target, classes)) is not None), None)

    def output_problem(self, output: tuple[int, ...], classes: int) -> str | None:
        return next((p for loss in self.losses.values() if (p := loss.output_problem(output, classes)) is not None), None)

    def items(self, batch: MicroBatch) -> torch.Tensor:
        return torch.stack([loss.items(batch) for loss in self.losses.values()])

    def step(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
        output, shares = forward(batch.x), batch.shares
        each = [batch.weight] * len(self.losses) if shares is None else shares.unbind()
        values = []
        for (name, loss), factor, share in zip(self.losses.items(), self.factors, each, strict=True):
            value = loss.step(self._giving(output, loss), replace(batch, weight=share, shares=None)) * share
            self.log(name, value)
            values.append(factor * value)
        return torch.stack(values).sum()

    def parts(self) -> dict[str, torch.Tensor]:
        below = [(name, loss.parts()) for name, loss in self.losses.items()]
        return super().parts() | {f"loss_{name}_{k.removeprefix('loss_')}": v for name, parts in below for k, v in parts.items()}

    def evaluate(self, forward: Callable[[object], object], batch: MicroBatch, need_output: bool) -> tuple[Tree, torch.Tensor]:
        """The output, and the sums of each part, one after the other."""
        output = forward(batch.x)
        return output, torch.cat([loss.evaluate(self._giving(output, loss), batch, False)[1] for loss in self.losses.values()])

    def _giving(self, output: Tree, loss: Loss) -> Forward:
        """A forward that returns the part of an output that a loss takes."""
        taken = output if loss.takes_whole or not self.takes_whole else self._context.model_call.measured(output)
        return lambda _: taken

    def evaluation_sums(self) -> int:
        return sum(loss.evaluation_sums() for loss in self.losses.values())

    def evaluated(self, sums: list[float]) -> dict[str, float]:
        found: dict[str, float] = {"loss": 0.0}
        for (name, loss), factor in zip(self.losses.items(), self.factors, strict=True):
            of_part, sums = sums[: loss.evaluation_sums()], sums[loss.evaluation_sums() :]
            for metric, value in loss.evaluated(of_part).items():
                found.setdefault(f"loss_{name}" if metric == "loss" else metric, value)
            found["loss"] += factor * found[f"loss_{name}"]
        return {metric: found[metric] for metric in self.metrics}
