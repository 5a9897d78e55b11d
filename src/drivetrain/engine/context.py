"""The build context with all that the engine knows of a run."""

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
    """Holds the build context's objects with their whole types: options know no more of each other than core.groups says."""

    loaded: Splits = field(init=False)  # as they were read
    data: Splits = field(init=False)
    parallel: Parallel = field(init=False)
    batch: Batch = field(init=False)
    precision: Precision = field(init=False)
    loss: Loss = field(init=False)
    first: MicroBatch | None = None  # the training samples of the example; None: it is zeros
    train_data: Pipeline = field(init=False)
    evaluated: Mapping[str, Mapping[str, Pipeline]] = field(init=False)
