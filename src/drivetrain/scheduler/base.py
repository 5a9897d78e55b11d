"""The base of all schedules: the warm-up, and setting the learning rate of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.horizon import Horizon, length_problem, run_horizon
from drivetrain.core.options.option import BuildContext, Effect, Length, Option, RunSpec, Share
from drivetrain.core.typed import StateDict


class Scheduler(Option, groups.Scheduler):
    """scheduler=constant: the base learning rate, after a linear warm-up if `warmup` is not 0.

    The warm-up rises from `warmup_start` × lr, as torch's LinearLR does, but never makes an update with learning rate 0.
    """

    stage_option: ClassVar[bool] = True
    stage_keys: ClassVar[tuple[str, ...]] = ("*",)
    effect: ClassVar[Effect] = "changes"
    changes = "the learning rate over the run"
    lengths: tuple[str, ...] = ("warmup",)  # the arguments that are lengths, or lists of them
    _final_decay: float | None = None  # the final weight decay as a share of the initial one
    plot_note = ""  # text below a plot of the schedule, for what a plot cannot show

    @property
    def constant(self) -> bool:
        """True if the learning rate stays after its warm-up."""
        return type(self) is Scheduler

    def __init__(self, warmup: Length = 0.0, warmup_start: Share = 0.0) -> None:
        self.warmup, self.warmup_start = warmup, warmup_start

    def validate(self, run: RunSpec) -> Iterator[str]:
        wrong = [problem for setting in self.lengths for problem in self._unreadable(setting)]
        yield from wrong
        # A debugging run is cut short on purpose, so it may be shorter than its schedule.
        if not wrong and run.debug.updates is None and (horizon := run_horizon(run)) is not None:
            yield from self.horizon_problems(horizon)

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.debug.updates is None and (horizon := run_horizon(run)) is not None:
            yield from self.horizon_advice(horizon, run)

    def _unreadable(self, setting: str) -> Iterator[str]:
        value = getattr(self, setting)
        for length in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            yield from length_problem(f"scheduler.{setting}", length)

    def horizon_problems(self, horizon: Horizon) -> Iterator[str]:
        """Impossible lengths for a run of this horizon: one line each."""
        return iter(())

    def horizon_advice(self, horizon: Horizon, run: RunSpec) -> Iterator[str]:
        """Possible but probably unintended lengths for a run of this horizon: one line each."""
        if round(horizon.in_updates(self.warmup)) >= horizon.updates:
            yield f"{beside_run('warmup', self.warmup, horizon)}: the learning rate never reaches optimizer.lr"

    def set_horizon(self, horizon: Horizon) -> None:
        """Convert all lengths to updates of a run of this horizon. Required before `lr_factor`."""
        self._warmup = round(horizon.in_updates(self.warmup))

    def setup(self, context: BuildContext) -> None:
        self.bind(context.optimizer, *context.horizon)
        option = context.run.optimizer
        if option.final_weight_decay is not None:
            self._final_decay = option.final_weight_decay / option.weight_decay

    def bind(self, optimizer: torch.optim.Optimizer, updates: int, ends: Sequence[int] | None = None) -> None:
        """Control this optimizer in a run of `updates` updates. `ends` are the numbers of updates made when each epoch ends."""
        self.set_horizon(Horizon(updates, ends or [updates]))
        self.optimizer, self._updates = optimizer, updates
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]

    def step(self, update: int) -> None:
        """Set learning rate and weight decay of all parameter groups for update number `update`, from 0."""
        factor = self.lr_factor(update)
        for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
            set_group_value(group, "lr", base * factor)
        if self._final_decay is not None:
            decayed = self._final_decay + (1 - self._final_decay) * (1 + math.cos(math.pi * min(1, update / self._updates))) / 2
            for group, decay in zip(self.optimizer.param_groups, self._decays, strict=True):
                set_group_value(group, "weight_decay", decay * decayed)

    def lr_factor(self, update: int) -> float:
        """The factor of the base learning rate for update number `update`, from 0."""
        if update < self._warmup:
            peak = self.factor_after_warmup(0)
            return self.warmup_start + (peak - self.warmup_start) * (update + 1) / (self._warmup + 1)
        return self.factor_after_warmup(update - self._warmup)

    def factor_after_warmup(self, since: int) -> float:
        """`lr_factor` for the update `since` updates after the end of the warm-up."""
        return 1.0

    def momentum_at(self, update: int) -> float | None:
        """The momentum (Adam's beta1) for update number `update`; None if the schedule does not change it."""
        return None

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Receive the metrics of an evaluation, which are the same on every rank."""

    def state_dict(self) -> StateDict:
        """State beyond the update number, for a resumed run."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load `state_dict()`."""


def beside_run(setting: str, length: Length, horizon: Horizon) -> str:
    """A length in updates and the length of the run, for messages."""
    return f"scheduler.{setting}={length} is {horizon.in_updates(length):.0f} updates and the run has {horizon.updates}"


def zero_length_problem(setting: str, length: Length, horizon: Horizon) -> Iterator[str]:
    """A problem if this length, which must not be zero, is zero."""
    if horizon.in_updates(length) == 0:
        yield f"scheduler.{setting}={length} is zero updates: make it longer"


def early_end_problem(length: Length | None, warmup: Length, horizon: Horizon) -> Iterator[str]:
    """A problem if the schedule ends within its warm-up."""
    if length is not None and horizon.in_updates(length) <= horizon.in_updates(warmup):
        yield f"scheduler.length={length} ends within scheduler.warmup={warmup}: set it longer, or null for the run"


def late_end_advice(length: Length | None, horizon: Horizon) -> Iterator[str]:
    """Advice if the run ends before the schedule."""
    if length is not None and horizon.in_updates(length) > horizon.updates:
        yield f"{beside_run('length', length, horizon)}: the run ends before the learning rate has reached its end"


def set_group_value(group: StateDict, key: str, value: float) -> None:
    """Set a number in a parameter group. A tensor is filled in place, because a recorded graph may read it."""
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
