"""Takes a run from stage to stage. At a boundary it does in memory what an exact resume does: state, build, restore."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from drivetrain.compile import Compile
from drivetrain.core.errors import UserError, collecting, refuse
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.options import stages as core
from drivetrain.core.options.horizon import Progress
from drivetrain.core.options.protocols import LogWriter
from drivetrain.core.options.run_spec import Stage
from drivetrain.core.options.stages import Boundary
from drivetrain.core.step import streams
from drivetrain.core.step.step import Stream
from drivetrain.core.typed import StateDict
from drivetrain.engine import build
from drivetrain.engine.context import RunContext
from drivetrain.engine.out_of_memory import free_memory
from drivetrain.engine.trainer import Trainer
from drivetrain.model import Model
from drivetrain.optimizer import Optimizer
from drivetrain.saving import checkpoint_io
from drivetrain.saving.sharded_checkpoint import by_name
from drivetrain.saving.writer import HostCopy, Writer

DIFFERENT = 3  # parameters of another shape that a message names

logger = logging.getLogger(__name__)


class BoundaryReached(Exception):
    """The run has come to the end of a stage, between two updates."""


@dataclass
class StagedRun:
    """A run whose trainer is built anew for each of its stages. The trainer itself knows nothing of stages.

    A run without stages has one that lasts to its end, and nothing is added to its step.
    """

    context: RunContext
    writers: Sequence[LogWriter]
    trainer: Trainer = field(init=False)  # of the stage that the run is in
    number: int = field(default=0, init=False)  # of the stage that the trainer is in
    ends: list[Boundary] = field(default_factory=list, init=False)  # of all stages but the last

    def __post_init__(self) -> None:
        self.stages: Sequence[Stage] = self.context.run.stages

    def build(self) -> Trainer:
        """Build the trainer of the first stage. Raises UserError where a later stage needs a model of another shape."""
        if self.stages:
            self.context.run = self.stages[0].run
        self.trainer = build.build(self.context, self.writers)
        if self.stages:
            self.ends = core.boundaries(self.context.run, self.context.horizon)
            self._check_models()
            self._check_names()
            self._watch()
        return self.trainer

    def fit(self, stop: StopFlag | None = None) -> None:
        """Train to the end of the run, stage after stage."""
        self._tell()
        while True:
            try:
                return self.trainer.fit(stop)
            except BoundaryReached:
                self.restore(*self._full_state())
                self._tell()

    def restore(self, weights: dict[str, torch.Tensor], state: StateDict, to_evaluate: bool = False) -> None:
        """Continue from a checkpoint, in the stage of its progress. Called on all ranks.

        With `to_evaluate`, and where an evaluation is due still, it is the stage that made the checkpoint, also where the next
        update is one of the stage after it.
        """
        state = {**state, "optimizer": by_name(state["optimizer"])}  # a checkpoint may have numbers
        if self.stages:
            progress = Progress()
            progress.load_state_dict(state["progress"])
            evaluates = to_evaluate or progress.evaluation_due
            self._enter((core.number_that_made if evaluates else core.number_at)(self.ends, progress))
            state = {**state, "optimizer": checkpoint_io.with_new_parameters(self.trainer.optimizer, state["optimizer"])}
        self.trainer.restore(weights, state)

    def _watch(self) -> None:
        """Let the stream of the stage end at its boundary; that of the last one ends with the run."""
        if self.number < len(self.ends):
            end = self.ends[self.number]
            self.trainer.stream_watchers = [*self.trainer.stream_watchers, lambda stream: self._until(end, stream)]

    def _until(self, end: Boundary, stream: Stream) -> Stream:
        with closing(stream):
            while True:
                if end.reached(self.context.progress):
                    raise BoundaryReached
                batch = next(stream, None)
                if batch is None:
                    return
                yield batch

    def _full_state(self) -> tuple[dict[str, torch.Tensor], StateDict]:
        """The weights and the state at the end of a stage, on all ranks."""
        trainer = self.trainer
        parallel = trainer.parallel
        trainer.record()
        trainer.writer.wait()
        state = trainer.state()  # gathers from all ranks, as does full_state_dict
        with trainer.evaluator.eval_weights():
            full = HostCopy(parallel.full_state_dict(trainer.model, state)).wait()
        weights, state = parallel.broadcast_object(full)  # rank 0's
        return weights, state

    def _enter(self, number: int) -> None:
        """Build the trainer of a stage, without its state."""
        if number == self.number:
            return
        before, context = self.stages[self.number].run, self.context
        compiled = self.trainer.compile_seconds()
        self.number, context.run, context.resumed = number, self.stages[number].run, True
        same = before.data.with_values(reads_up_to=None), context.run.data.with_values(reads_up_to=None)
        data = context.loaded if vars(same[0]) == vars(same[1]) else None
        self._free()
        kept = build.PreviousStage(self.trainer.parallel, data, self.trainer.timer, self.trainer.callbacks)
        with _named(number):
            built = build.build(context, self.writers, kept)
        if compiled is not None:
            of_stage = built.compile_seconds
            built.compile_seconds = lambda: (of_stage() or 0.0) + compiled
        self.trainer = built
        self._watch()

    def _free(self) -> None:
        """Keep of the trainer what it takes to record a run that ends here, because the next stage cannot be built.

        The model and all that was made for it are let go: the next stage needs the memory.
        """
        context, trainer = self.context, self.trainer
        compiled = trainer.compile_seconds()
        gone: Any = None  # parts that hold weights, or processes
        context.eval_model = nullcontext
        self.trainer = replace(
            trainer,
            model=gone, step=gone, optimizer=gone, scheduler=gone, precision=gone, ema=gone, loader=gone,
            evaluator=replace(trainer.evaluator, model=gone, forward=gone, eval_weights=gone, ema=gone, precision=gone),
            writer=Writer(context.run_dir, trainer.saving, trainer.parallel, nullcontext),
            compiler=Compile(), compile_seconds=lambda: compiled,
            stream_watchers=[],
        )  # fmt: skip
        del trainer, context.model, context.optimizer, context.read
        self.trainer.parallel.leave_model()
        free_memory(self.trainer.device)

    def _tell(self) -> None:
        """Log which stage begins."""
        if self.stages:
            stage, trainer = self.stages[self.number], self.trainer
            end = f" ({self.ends[self.number]})" if self.number < len(self.ends) else ""
            if trainer.parallel.world.rank == 0:
                at = f"update {trainer.progress.updates:,}: stage {self.number + 1} of {len(self.stages)}"
                logger.info("%s, %s%s: %s", at, stage.end, end, stage.settings)
            # A run that is resumed within the stage does not record its beginning again.
            if not (self.ends[self.number - 1].passed(trainer.progress) if self.number else trainer.progress.updates):
                trainer.log.write("stage", stage=self.number + 1, stages=len(self.stages), changes=stage.title)

    def _check_models(self) -> None:
        """Refuse a stage in which the model would have parameters of another shape: the weights could not continue."""
        context, first = self.context, _shapes(self.context, self.stages[0])
        for number, stage in enumerate(self.stages[1:], 1):
            with _named(number):
                shapes = _shapes(context, stage)
            different = [name for name in {**first, **shapes} if first.get(name) != shapes.get(name)] if first and shapes else []
            if different:
                shown = ", ".join(
                    f"{name} {list(first.get(name, ())) or 'absent'} → {list(shapes.get(name, ())) or 'absent'}"
                    for name in different[:DIFFERENT]
                )
                raise UserError(
                    f"stages[{number}] ({stage.title}): {context.run.named('model')} has parameters of another shape there "
                    f"({shown}), so that the weights cannot go on: take a model whose weights do not depend on it, such as a "
                    "convolutional network without a layer for each position"
                )

    def _check_names(self) -> None:
        """Refuse settings of later stages that name parameters which the model does not have, all at once."""
        model, problems = self.context.model, list[str]()
        for number, stage in enumerate(self.stages[1:], 1):
            context = copy.copy(self.context)
            context.run = stage.run
            with collecting(problems), _named(number):
                Optimizer.of(stage.run).check_names(Model.of(stage.run).trained(model, context))
        refuse(problems)


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Within the context the messages of a UserError begin with the stage."""
    try:
        yield
    except UserError as error:
        raise UserError([f"stages[{number}]: {problem}" for problem in error.problems]) from None


def _shapes(context: RunContext, stage: Stage) -> Mapping[str, tuple[int, ...]]:
    """The shapes of a stage's parameters, by name; {} where the data decides them."""
    run, shape = stage.run, stage.run.data.shape()
    if shape is None or not isinstance(context.data.shape, tuple) or len(shape) != len(context.data.shape):
        return {}
    tried = RunContext(run, context.world, context.run_dir)
    tried.device, tried.seed, tried.data = torch.device("meta"), context.seed, replace(context.data, shape=shape)
    try:
        with streams.apart(), torch.device("meta"):
            return {name: tuple(p.shape) for name, p in Model.of(run).create_for(tried).named_parameters()}
    except UserError:
        raise
    except Exception:  # a network that cannot be made without memory; building its stage says why
        return {}
