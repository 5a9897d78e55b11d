"""The build context with the engine's own facts about a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain.batch.base import Batch
from drivetrain.core.options.context import BuildContext
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.data.base import Splits
from drivetrain.loader import Pipeline
from drivetrain.loss import Loss
from drivetrain.parallel import Parallel
from drivetrain.precision import Precision


@dataclass
class RunContext(BuildContext):
    """The build context's objects with their full types: options only know each other's types from core.groups."""

    loaded: Splits = field(init=False)  # unchanged since reading
    data: Splits = field(init=False)
    parallel: Parallel = field(init=False)
    batch: Batch = field(init=False)
    precision: Precision = field(init=False)
    loss: Loss = field(init=False)
    first: MicroBatch | None = None  # the example's training samples; None: the example is zeros
    train_data: Pipeline = field(init=False)
    evaluated: Mapping[str, Mapping[str, Pipeline]] = field(init=False)
