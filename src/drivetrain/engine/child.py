"""A question to a run's trainer, which a process of its own builds: nothing of it affects this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from drivetrain.config import validate
from drivetrain.core import forking
from drivetrain.core.option import RunSpec
from drivetrain.core.signals import ended_by_signals
from drivetrain.core.world import World
from drivetrain.engine.context import RunContext
from drivetrain.precision import Precision
from drivetrain.run import directory

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

T = TypeVar("T")


def ask(run: RunSpec, question: Callable[[Trainer], T], failed: str, limit_s: float = forking.LIMIT_S, values: bool = True) -> T:
    """Return `question(trainer)` of a forked process, which has a run's directory until it has answered.

    Without `values` the trainer's weights are fake tensors. Raises UserError: the run's own, or forking.NoAnswer, whose message
    begins with `failed`.
    """
    import torch  # noqa: F401 - imported once here, because the process is forked

    folder = directory.create(Path(run.values["output_dir"]), "probe")

    def work(answer: Callable[[T], None]) -> None:
        from drivetrain.engine import build
        from drivetrain.engine.rehearsal.recorder import Fakes

        validate.validate_device(run)
        looking = run.with_parts(precision=Precision.of(run).with_values(looks_for_slow_layers=values))
        context = RunContext(looking, World(), folder, without_values=None if values else Fakes().as_parameters())
        answer(question(build.build(context, [])))

    try:
        with ended_by_signals():
            return forking.answer_of(work, failed, limit_s)
    finally:
        directory.remove(folder)
