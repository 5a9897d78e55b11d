"""Frozen parameters: some never train, some begin to train during a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from drivetrain.core.errors import UserError
from drivetrain.core.options.allowed import check_patterns, matches
from drivetrain.core.options.horizon import Horizon, Progress
from drivetrain.core.options.option import Length
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.modules import is_kept_in_evaluation, keep_in_evaluation
from drivetrain.core.step.step import WrappingStep

NEVER = math.inf


class Schedule:
    """The number of updates before which each parameter is frozen: a pure function of names and settings."""

    def __init__(self, names: Sequence[str], freeze: Sequence[str], unfreeze: Mapping[str, Length], horizon: Horizon) -> None:
        """Raises UserError for a pattern that matches nothing."""
        self.horizon = horizon
        self._freeze, self._lengths = freeze, unfreeze
        self._starts = {pattern: math.ceil(horizon.in_updates(length)) for pattern, length in unfreeze.items()}
        check_patterns(names, {"model.freeze": freeze}, "parameter")
        frozen = [name for name in names if any(matches(name, pattern) for pattern in freeze)]
        check_patterns(frozen, {"model.unfreeze": list(unfreeze)}, "parameter that model.freeze freezes,")

    def start(self, name: str) -> float:
        """Return the number of updates after which a parameter trains: 0 if not frozen, the earliest if several match."""
        if not any(matches(name, pattern) for pattern in self._freeze):
            return 0
        return min((start for pattern, start in self._starts.items() if matches(name, pattern)), default=NEVER)

    def norm_start(self, name: str, norm: torch.nn.Module) -> float:
        """Return the number of updates after which a norm's statistics change: when the first of its parameters trains."""
        own = [parameter for parameter, _ in norm.named_parameters(recurse=False)] or ["running_mean"]
        return min(self.start(f"{name}.{parameter}".lstrip(".")) for parameter in own)

    def describe(self) -> Iterator[str]:
        """Yield one line for each stage of `unfreeze` after the first."""
        for pattern, start in sorted(self._starts.items(), key=lambda item: item[1]):
            if start:
                late = ", which this run does not reach" if start >= self.horizon.updates else ""
                yield f"{pattern} trains after update {start} (model.unfreeze={self._lengths[pattern]}){late}"


def freeze(model: torch.nn.Module, schedule: Schedule) -> Iterator[str]:
    """Set requires_grad=False on parameters that never train, and keep the statistics of norms that never train.

    Yields lines to log. Raises UserError if no parameter trains from the start.
    """
    parameters = dict(model.named_parameters())
    starts = {name: schedule.start(name) for name, p in parameters.items() if p.requires_grad}
    _check_some_train(starts)
    for name, start in starts.items():
        parameters[name].requires_grad_(start != NEVER)
    for name, norm in _norms(model):
        if schedule.norm_start(name, norm):
            keep_in_evaluation(norm)
    kept = sum(schedule.norm_start(name, norm) == NEVER for name, norm in _norms(model))
    frozen = sum(parameters[name].numel() for name, start in starts.items() if start)
    total = sum(p.numel() for p in parameters.values())
    statistics = f"; {kept} norms keep their statistics" if kept else ""
    yield f"{frozen:,} of {total:,} parameters are frozen{statistics}"
    yield from schedule.describe()


def trained(names: Sequence[str], schedule: Schedule) -> list[str]:
    """Return the names of parameters that train at any time. Raises UserError if none does from the start."""
    starts = {name: schedule.start(name) for name in names}
    _check_some_train(starts)
    return [name for name, start in starts.items() if start != NEVER]


def _check_some_train(starts: Mapping[str, float]) -> None:
    if 0 not in starts.values():
        raise UserError(
            "model.freeze freezes every parameter of the model, so that nothing trains at the start: leave out what is to be "
            "trained (the head), or give it in model.unfreeze={head: 0}"
        )


class Unfreezing:
    """A model's parameters and norms that begin to train at an update after the first."""

    def __init__(self, model: torch.nn.Module, schedule: Schedule) -> None:
        starts = ((p, schedule.start(name)) for name, p in model.named_parameters() if p.requires_grad)
        norms = ((name, norm) for name, norm in _norms(model) if is_kept_in_evaluation(norm))
        norm_starts = ((norm, schedule.norm_start(name, norm)) for name, norm in norms)
        self._parameters = [(p, start) for p, start in starts if start]
        self._norms = [(norm, start) for norm, start in norm_starts if 0 < start < NEVER]
        self.next = 0.0  # the next update with a change; the first call sets the current state

    def reach(self, update: int) -> None:
        """Set requires_grad for an update."""
        for p, start in self._parameters:
            p.requires_grad_(start <= update)
        for norm, start in self._norms:
            keep_in_evaluation(norm, start > update)
        starts = [start for _, start in (*self._parameters, *self._norms)]
        self.next = min((start for start in starts if start > update), default=NEVER)


@dataclass(eq=False)
class UnfreezingStep(WrappingStep):
    """A step that unfreezes parameters before an update, depending only on the number of updates."""

    unfreezing: Unfreezing
    progress: Progress

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        if self.progress.updates >= self.unfreezing.next:
            self.unfreezing.reach(self.progress.updates)
        self.inner.micro_batch(batch, loss_sum)


def _norms(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield names and modules of norms with running statistics."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats:
            yield name, module
