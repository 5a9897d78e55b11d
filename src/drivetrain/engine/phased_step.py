"""A step whose updates have phases: several parts of a model, each with its own optimizer and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from drivetrain.clip.base import Clip, Norm
from drivetrain.core.options import phases as settings
from drivetrain.core.options.horizon import Progress
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.step import Step
from drivetrain.engine.context import RunContext
from drivetrain.optimizer import Optimizer
from drivetrain.precision.base import Precision


@dataclass(eq=False)
class BuiltPhase:
    """A built phase of an update."""

    name: str
    every: int
    parameters: Sequence[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    precision: Precision
    clip: Callable[[], bool | None]
    loss_sum: torch.Tensor  # 0-d: of its runs since the last record
    runs: int = 0  # since the last record
    made: bool = False  # in the last update
    step: Step = field(init=False)  # set where the run's step is composed


@contextmanager
def alone(parameters: Sequence[torch.nn.Parameter], others: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Within the context no gradients are computed for the other parameters."""
    own = set(map(id, parameters))
    frozen = [p for p in others if p.requires_grad and id(p) not in own]
    for p in frozen:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)


def build(context: RunContext) -> list[BuiltPhase]:
    """Build the phases of a run, in their order; [] where it has none. Raises UserError where they divide no parameters."""
    found, run = settings.of(context.run), context.run
    trained = {name: p for name, p in context.model.named_parameters() if p.requires_grad}
    built = []
    for name, names in settings.divided(found, trained).items() if found else ():
        given, own = found[name], [trained[n] for n in names]
        option = Optimizer.of(run) if given.lr is None else replace(Optimizer.of(run), lr=given.lr)
        clip = Clip.of(run) if given.max_norm is None else Norm(given.max_norm)
        with alone(own, trained.values()):
            of_phase = context.precision.of_phase(name)
            optimizer = context.optimizer = of_phase.build_optimizer(option, context)
            total = torch.zeros((), device=context.device)
            built.append(BuiltPhase(name, given.every, own, optimizer, of_phase, clip.build(context), total))
    return built


@dataclass(eq=False)
class PhasedStep:
    """Runs the phases of an update one after the other, on the same micro-batches, collected on the device.

    In each phase only its own parameters get gradients, which are cleared after it. An update counts once for all its phases,
    and as skipped if all of them were skipped.
    """

    phases: Sequence[BuiltPhase]
    parameters: Sequence[torch.nn.Parameter]  # of all phases
    progress: Progress
    waiting: list[MicroBatch] = field(default_factory=list, init=False)
    _done: dict[str, bool] = field(default_factory=dict, init=False)  # phase of this update → whether it was made

    def micro_batch(self, batch: MicroBatch, loss_sum: torch.Tensor) -> None:
        self.waiting.append(batch)
        self._loss_sum = loss_sum

    def update(self) -> bool:
        for phase in self.phases:
            if (self.progress.updates + 1) % phase.every == 0 and phase.name not in self._done:
                with alone(phase.parameters, self.parameters):
                    self._done[phase.name] = self._run(phase)
            phase.made = self._done.get(phase.name, False)
        self._done = {}
        return any(phase.made for phase in self.phases)

    def _run(self, phase: BuiltPhase) -> bool:
        total = torch.zeros_like(self._loss_sum)
        try:
            for batch in self.waiting:
                phase.step.micro_batch(batch, total)
            made = bool(phase.step.update())
        finally:
            phase.step.zero_grad()
        self._loss_sum += total
        phase.loss_sum += total
        phase.runs += 1
        return made

    def zero_grad(self) -> None:
        """Drop the collected micro-batches. When an update that ran out of memory is repeated, finished phases are not."""
        self.waiting = []

    def with_forward(self, forward: Callable[..., torch.Tensor]) -> Step:
        phases = [replace(phase) for phase in self.phases]
        for phase, own in zip(phases, self.phases, strict=True):
            phase.step = own.step.with_forward(forward)
        return PhasedStep(phases, self.parameters, self.progress)
