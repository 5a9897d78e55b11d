"""What all schedules share: lengths laid over a run, the warm-up, the optimizer that follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.core.horizon import Horizon, horizon, length_problem
from drivetrain.core.lazy import torch
from drivetrain.core.option import Length, Option, RunSpec, Share

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext


class Scheduler(Option):
    """scheduler=constant: the base learning rate, after a linear warm-up if there is one.

    The warm-up rises from `warmup_start` × lr, as torch's LinearLR does, and never makes an update at rate 0.
    """

    lengths: tuple[str, ...] = ("warmup",)  # the knobs that are lengths, or lists of them
    remark = ""  # what a drawing of the curve cannot show

    @property
    def constant(self) -> bool:
        """Whether the learning rate stays after its warm-up."""
        return type(self) is Scheduler

    def __init__(self, warmup: Length = 0.0, warmup_start: Share = 0.0) -> None:
        self.warmup, self.warmup_start = warmup, warmup_start

    def validate(self, run: RunSpec) -> Iterator[str]:
        wrong = [problem for knob in self.lengths for problem in self._unreadable(knob)]
        yield from wrong
        # A debugging run may be shorter than its schedule: it is there to be cut short.
        if not wrong and run.debug.updates is None and (over := horizon(run)) is not None:
            yield from self.rules(over)

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.debug.updates is None and (over := horizon(run)) is not None:
            yield from self.advice(over, run)

    def _unreadable(self, knob: str) -> Iterator[str]:
        value = getattr(self, knob)
        for length in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            yield from length_problem(f"scheduler.{knob}", length)

    def rules(self, over: Horizon) -> Iterator[str]:
        """Problems of the lengths over this run."""
        return iter(())

    def advice(self, over: Horizon, run: RunSpec) -> Iterator[str]:
        """Lengths that work over this run and are probably not meant."""
        if round(over.of(self.warmup)) >= over.updates:
            yield (
                f"scheduler.warmup={self.warmup} is {over.of(self.warmup):.0f} updates and the run has {over.updates}: "
                "the learning rate never gets to optimizer.lr"
            )

    def lay(self, over: Horizon) -> None:
        """Lay the curve over a run."""
        self._warmup = round(over.of(self.warmup))

    def setup(self, context: BuildContext) -> None:
        self.start(context.optimizer, *context.horizon)

    def start(self, optimizer: torch.optim.Optimizer, updates: int, ends: Sequence[int] | None = None) -> None:
        """Bind to an optimizer for a run of `updates` updates, whose epochs end after `ends`."""
        self.lay(Horizon(updates, ends or [updates]))
        self.optimizer, self._update = optimizer, 0
        self._base = [float(group["lr"]) for group in optimizer.param_groups]

    def step(self, update: int) -> None:
        """Set the learning rate for the update number `update`, from 0."""
        self._update = update
        factor = self.multiple(update)
        for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
            put(group, "lr", base * factor)

    def multiple(self, update: int) -> float:
        """The multiple of the base learning rate that update number `update` is made with."""
        if update < self._warmup:
            top = self.curve(0)
            return self.warmup_start + (top - self.warmup_start) * (update + 1) / (self._warmup + 1)
        return self.curve(update - self._warmup)

    def curve(self, since: int) -> float:
        """The multiple `since` updates after the warm-up."""
        return 1.0

    def momentum_at(self, update: int) -> float | None:
        """The momentum (Adam's beta1) of update number `update`; None where the schedule leaves it alone."""
        return None

    def evaluated(self, metrics: dict[str, float]) -> None:
        """Hear an evaluation's metrics, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs and the update number does not say."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take `state_dict()` back."""


def no_length(knob: str, length: Length, over: Horizon) -> Iterator[str]:
    """The problem of a length that must not be zero."""
    if over.of(length) == 0:
        yield f"scheduler.{knob}={length} is no length of time: make it longer"


def too_short(length: Length | None, warmup: Length, over: Horizon) -> Iterator[str]:
    """The problem of a schedule that ends within its warm-up."""
    if length is not None and over.of(length) <= over.of(warmup):
        yield f"scheduler.length={length} ends within scheduler.warmup={warmup}: set it longer, or null for the run"


def too_long(length: Length | None, over: Horizon) -> Iterator[str]:
    """The remark on a schedule that the run does not see the end of."""
    if length is not None and over.of(length) > over.updates:
        yield (
            f"scheduler.length={length} is {over.of(length):.0f} updates and the run has {over.updates}: "
            "it stops before the learning rate is down"
        )


def put(group: dict[str, Any], key: str, value: float) -> None:
    """Set a number of a parameter group; a tensor is filled in place, for the graph that holds it."""
    if isinstance(group[key], torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
