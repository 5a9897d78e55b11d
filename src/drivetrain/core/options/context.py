"""The build context: everything an option can use while it is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from drivetrain.core.lazy import torch
from drivetrain.core.options import groups
from drivetrain.core.options.horizon import Horizon, Progress
from drivetrain.core.options.run_spec import RunSpec
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.model_call import ModelCall
from drivetrain.core.step.source import PipelineParts
from drivetrain.core.step.step import Stream
from drivetrain.core.step.trees import Tree
from drivetrain.core.typed import Stateful
from drivetrain.core.world import World

NO_RUN_DIR = Path(os.devnull)  # of a run that keeps no files: a trial, or a rank that does not know the directory


class RunningPhase(Protocol):
    """A phase of the updates, in a run."""

    parameters: Sequence[torch.nn.Parameter]
    made: bool  # whether the last update has updated them


@dataclass
class BuildContext:
    """The facts about a run while it is built. `engine.build` fills it in, in its build order; options only read it.

    Reading a field before it is built raises AttributeError: the build order is wrong.
    """

    run: RunSpec
    world: World  # this process among all ranks
    run_dir: Path
    config_hash: str = ""  # differs between ranks that were started with different configs
    config: Mapping[str, object] = field(default_factory=dict)  # by dotted key, without machine-local keys
    findings: Callable[[], list[str]] = list  # the debug option's report at the end of the run, one line each
    progress: Progress = field(default_factory=Progress)  # how far the run is; the trainer updates it
    log_image: Callable[[str, Path], None] = lambda name, path: None  # shows a PNG file in all loggers; set by `engine.build`
    # Returns a context in which the model holds the weights of a name, ready for use; set by `engine.build`.
    eval_model: Callable[..., AbstractContextManager[torch.nn.Module]] = nullcontext
    resumed: bool = False  # whether a checkpoint is restored once the run is built
    trains: bool = True  # whether the model is trained, or only used
    phases: Sequence[RunningPhase] = ()  # of the updates
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # 0-d: figures of updates, added up since the last record
    kept: dict[str, Stateful] = field(default_factory=dict)  # name → an option's state, saved with the run
    on_exit: ExitStack = field(default_factory=ExitStack)  # undoes what an option changed for the whole process
    # A context that creates a model with shapes and no values, for a forecast; None: weights have values.
    without_values: AbstractContextManager[object] | None = None

    device: torch.device = field(init=False)
    seed: int = field(init=False)
    parallel: groups.Parallel = field(init=False)
    data: groups.Splits = field(init=False)  # as the loss takes them
    batch: groups.Batch = field(init=False)
    horizon: Horizon = field(init=False)
    precision: groups.Precision = field(init=False)
    model: torch.nn.Module = field(init=False)
    model_call: ModelCall = field(init=False)  # how the forward is called with a batch's inputs
    # The model's arguments in training, for `trees.call`: two training samples, if these can be read.
    example: Tree = field(init=False)
    first_call: Callable[[torch.nn.Module, int], tuple[MicroBatch, Tree]] = field(init=False)  # the same for this many samples
    memory_format: torch.memory_format = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    loss: groups.Loss = field(init=False)
    train_data: PipelineParts = field(init=False)
    # The evaluated sets: split (validation, where there is one, then test) → its sets by name ("" for a single one).
    evaluated: Mapping[str, Mapping[str, PipelineParts]] = field(init=False)
    read: Callable[[Iterable[Request]], Stream] = field(init=False)  # returns the micro-batches of training samples

    def parts(self) -> dict[str, torch.Tensor]:
        """The running sums of the figures whose means a training record has, such as the parts of the loss."""
        return {**self.loss.parts(), **self.sums}

    @property
    def judging_data(self) -> PipelineParts:
        """The set that selects models, of several the first: a validation set, or else a test set."""
        return next(iter(next(iter(self.evaluated.values())).values()))

    @property
    def writes_files(self) -> bool:
        """True if this process writes the run's common files (not those of each rank)."""
        return self.world.rank == 0 and self.run_dir != NO_RUN_DIR
