"""Builds a run's trainer to answer a question about it: in an isolated process, or in this one."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from drivetrain.config import validate
from drivetrain.core.machine import forking, guards, isolation
from drivetrain.core.machine.signals import ended_by_signals
from drivetrain.core.options.context import NO_RUN_DIR
from drivetrain.core.options.option import RunSpec
from drivetrain.core.world import World
from drivetrain.engine.context import RunContext
from drivetrain.precision import Precision
from drivetrain.run import directory

if TYPE_CHECKING:
    from drivetrain.engine.trainer import Trainer

T = TypeVar("T")


def ask(
    run: RunSpec, question: Callable[[Trainer], T], failed: str, limit_s: float = forking.LIMIT_S, values: float = math.inf
) -> T:
    """Return `question(trainer)` from a forked process, which has a run's directory until its answer.

    The weights of a model larger than `values` bytes are fake tensors. Raises UserError: the run's own, or forking.NoAnswer,
    with a message that begins with `failed`.
    """
    import torch  # noqa: F401 - imported once here, because the process is forked

    with ended_by_signals(), directory.temporary() as folder:

        def work(answer: Callable[[T], None]) -> None:
            validate.validate_device(run)
            answer(question(built(run, values, ExitStack(), folder)))

        return forking.answer_of(work, failed, limit_s)


def built(run: RunSpec, values: float, on_exit: ExitStack, folder: Path = NO_RUN_DIR) -> Trainer:
    """Build the trainer in this process: see `ask`. `on_exit` undoes its changes to the whole process."""
    from drivetrain.engine import build
    from drivetrain.engine.rehearsal import Fakes

    if 0 < values < math.inf:
        with suppress(guards.ModelTooLarge), guards.model_within(int(values), "the model", counts_meta=True):
            return built(run, math.inf, on_exit, folder)
        values = 0
    on_exit.enter_context(isolation.isolated())
    looking = run.with_parts(precision=Precision.of(run).with_values(looks_for_slow_layers=bool(values)))
    without_values = None if values else Fakes().as_parameters()
    return build.build(RunContext(looking, World(), folder, on_exit=on_exit, without_values=without_values), [])
