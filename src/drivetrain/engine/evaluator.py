"""Computes the metrics of a model over a data set."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace

import torch

from drivetrain.batch.base import Batch
from drivetrain.core.errors import Diverged, UserError
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.options.selection import Figure
from drivetrain.core.step import rng, streams
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.source import Augmentation
from drivetrain.core.step.step import StreamWatcher
from drivetrain.core.step.target_kinds import TargetKind
from drivetrain.core.step.tensors import send
from drivetrain.core.step.trees import Tree, described
from drivetrain.core.typed import JsonMapping
from drivetrain.core.user import state as owned
from drivetrain.core.user.callback import AVERAGE, PLAIN
from drivetrain.core.user.state import OwnState, untouched
from drivetrain.data.base import SPLITS, Splits
from drivetrain.ema.base import Ema
from drivetrain.loader import Loader
from drivetrain.loader.base import Pipeline
from drivetrain.loss.base import Loss
from drivetrain.metrics.base import Metric, TableRecord
from drivetrain.parallel.base import Parallel
from drivetrain.precision.base import Precision

EVALUATION = 12  # of the random numbers of evaluated sets

logger = logging.getLogger(__name__)


@dataclass
class Evaluator:
    """Evaluates a model and the average of its weights on the sets of a split, such as the validation sets that select models."""

    model: torch.nn.Module  # set to evaluation mode during evaluation, then back to training mode
    forward: Callable[[Tree], Tree]  # the model as evaluation calls it, with a batch's inputs
    eval_weights: Callable[[], AbstractContextManager[None]]  # a context in which the model holds the weights to evaluate
    ema: Ema
    loss: Loss
    meters: Sequence[Metric]  # the configured metrics, in addition to the loss's own
    units: Callable[[Tree], Tree]  # turns outputs and targets into those that the metrics measure
    measured: Callable[[Tree], Tree]  # takes the part of an output that metrics measure
    selected: str  # the metric that ranks models
    precision: Precision
    parallel: Parallel
    batch: Batch
    loader: Loader
    sets: Mapping[str, Mapping[str, Pipeline]]  # split → its sets by name ("" for a single one). The first split selects
    set: str  # the split that is evaluated: validation or test
    device: torch.device
    memory_format: torch.memory_format
    max_batches: int | None = None
    watch: StreamWatcher = lambda stream: stream  # sees the micro-batches that are evaluated
    origins: Mapping[str, str] = field(default_factory=dict)  # set → where its samples come from, in words, where it is known
    tables: dict[str, TableRecord] = field(default_factory=dict)  # of the last evaluation, by name

    def on(self, name: str) -> Evaluator:
        """Return the evaluator of a split, by its name. Raises UserError where the run has no such set."""
        if name == self.set:
            return self
        if name not in self.sets:
            raise UserError(f"split={name}: this run has no {name} set (data.validation=null): set split=test")
        return replace(self, set=name, tables={})

    @property
    def data(self) -> Pipeline:
        """The set that is evaluated, of several the first."""
        return next(iter(self.sets[self.set].values()))

    def samples(self) -> int:
        """Return how many samples an evaluation has."""
        return sum(len(pipeline.source) for pipeline in self.sets[self.set].values())

    def shares(self, kind: TargetKind | None) -> dict[str, int]:
        """Return the figures that are shares of a set's samples with one answer each, and the number of these samples.

        `kind` is the targets' kind. A sample of masks, tokens or labels has several answers, which depend on each other.
        """
        if self.max_batches is not None or kind not in ("class", None):
            return {}
        names = [*self.loss.counting, *(name for meter in self.meters if meter.share for name in meter.directions)]
        averages = {False, self.ema.active}
        sizes = {of_set: len(data.source) for of_set, data in self.sets[self.set].items()}
        return {str(Figure(name, averaged, of)): size for of, size in sizes.items() for averaged in averages for name in names}

    @contextmanager
    def holding(self, weights: str | None = None) -> Iterator[torch.nn.Module]:
        """Within the context the model holds the weights of this name, ready for use; None: the average, where there is one.

        It keeps no gradients. Its random draws are the same each time and do not advance the run's random streams.
        """
        known = (PLAIN, AVERAGE) if self.ema.active else (PLAIN,)
        name = weights or known[-1]
        if name not in known:
            raise UserError(f"eval_model({name!r}): this run evaluates the weights {' and '.join(known)} (see ema)")
        if self.parallel.lockstep_evaluation:
            raise UserError("eval_model: each rank holds only a part of the model: set parallel=ddp")
        if name == AVERAGE and self.ema.stale and self.parallel.world.size > 1:
            raise UserError(
                "eval_model('average'): all ranks complete this average when they evaluate it: use it in `evaluation`"
            )
        held, training = self._held(name), self.model.training
        with held, self.parallel.evaluation_context(), streams.apart(), self.precision.autocast():
            streams.seed_all(self.data.seed)
            self.model.eval()
            try:
                yield self.model
            finally:
                self.model.train(training)

    def _held(self, weights: str) -> AbstractContextManager[None]:
        """Return a context in which the model holds weights. Before the first average these are the trained weights."""
        return self.ema.swapped() if weights == AVERAGE and self.ema.started else self.eval_weights()

    def check(self) -> None:
        """Try the user's code and the metrics on a few samples. Raises UserError where these cannot take the output."""
        if not self.meters and not self.loss.keeps():
            return
        tried = min(max([2, *(meter.tried_on for meter in self.meters)]), self.batch.micro_batch(self.parallel.data_world))
        rows = torch.arange(tried) % len(self.data.source)
        x, y = (send(tree, self.device) for tree in self.data(Request(0, rows, 1.0)))
        batch, training = MicroBatch(x, y, torch.ones((), device=self.device), True, False), self.model.training
        self.model.eval()
        with untouched(self.loss.keeps()), self._held(PLAIN), self.parallel.evaluation_context():
            with self.precision.autocast():
                output = self._checked_loss(batch)
            for meter in self.meters:
                try:
                    meter.check(self._shown(output), self.units(batch.y), batch)
                except UserError:
                    raise
                except Exception as error:
                    said = next(iter(str(error).strip().splitlines()), "")
                    hint = "" if isinstance(output, torch.Tensor) else ": set forward_output to a part of it"
                    raise UserError(
                        f"metrics=[{meter.name or 'own'}] cannot take what the model returns, {described(output)}, and the "
                        f"targets, {described(batch.y)} ({type(error).__name__}: {said}){hint}"
                    ) from error
        self.model.train(training)

    def _needs_output(self) -> bool:
        return any(meter.needs_output for meter in self.meters)

    def _shown(self, output: Tree) -> Tree:
        """Return the part of an output that metrics measure, in the data's units; None where no metric needs one."""
        return self.units(self.measured(output)) if self._needs_output() else None

    def _checked_loss(self, batch: MicroBatch) -> Tree:
        """Return the output of an example. Raises UserError where the loss needs gradients."""
        try:
            return self.loss.evaluate(self.forward, batch, self._needs_output())[0]
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise UserError(
                "the loss differentiates, and an evaluation computes no gradients: let it do so within torch.enable_grad()"
            ) from error

    def evaluate(self, stops: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Return the figures by name (`core.figure`), without those that are not finite. Raises Diverged where a loss is not.

        `stops` is called before each batch, equally often on all ranks: where it is true on all of them, Interrupted is raised.
        """
        self.parallel.broadcast_buffers(self.model)
        self.tables = {}
        with self._held(PLAIN):
            metrics = self.metrics(stops=stops)
        if self.ema.active and not self.ema.started:
            self.tables |= {str(Figure.parse(name)._replace(averaged=True)): table for name, table in self.tables.items()}
            metrics |= {str(Figure.parse(name)._replace(averaged=True)): value for name, value in metrics.items()}
        elif self.ema.active:
            with self._held(AVERAGE):
                self.parallel.broadcast_buffers(self.model)  # each rank averaged its own buffers
                metrics |= self.metrics(averaged=True, stops=stops)
        return metrics

    def metrics(self, averaged: bool = False, stops: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Return the figures of the model's current weights on all sets, and add their tables.

        Raises Diverged and, by `stops`, Interrupted. The loss's state is restored, so that evaluations leave training unchanged.
        """
        found: dict[str, float] = {}
        with OwnState(owned.find(self.loss.keeps())).untouched():
            for name in self.sets[self.set]:
                found |= self._metrics_of(name, averaged, stops)
        return found

    def _metrics_of(self, name: str, averaged: bool, stops: Callable[[], bool]) -> dict[str, float]:
        """Return the figures of the model's current weights on a set.

        Ranks reduce sums and counts, not means, so that every sample counts once on any number of ranks. A forward's random draws
        follow from the seed, the set and the batch: training's random streams do not advance.
        """
        data, where = self.sets[self.set][name], f"the {self.set} set {name}".rstrip()
        of = f"of the {'averaged' if averaged else 'trained'} weights on {where}"
        self.model.eval()
        sums = torch.zeros(self.loss.evaluation_sums(), dtype=sum_dtype(self.device), device=self.device)
        world, lockstep = self.parallel.data_world, self.parallel.lockstep_evaluation
        requests = self.batch.evaluation_requests(data.source, world, self.max_batches, lockstep)
        rounds = self.batch.evaluation_rounds(data.source, world, self.max_batches)
        stream = self.watch(self.loader.stream(data, requests, self.device, self.memory_format))
        needs_output = self._needs_output()
        for meter in self.meters:
            meter.reset()
        with self.parallel.evaluation_context(), streams.apart():
            with closing(stream):
                for number, batch in enumerate(stream):
                    rounds -= 1
                    StopFlag.stop_here(stops)
                    streams.seed_all(rng.mix(data.seed, number * world.size + world.rank))
                    with self.precision.autocast():
                        output, of_batch = self.loss.evaluate(self.forward, batch, needs_output)
                    sums += of_batch * batch.weight
                    for meter in () if batch.filler else self.meters:
                        meter.update(self._shown(output), self.units(batch.y), batch)
            if rounds > 0:  # the other ranks have one batch more
                StopFlag.stop_here(stops)
            try:
                figures = self.loss.evaluated(self.parallel.all_reduce_sum(sums).tolist())
            except ZeroDivisionError:
                figures = self._without_targets(name, where)
            if not all(map(math.isfinite, figures.values())):
                raise Diverged(f"the loss {of} is not finite: {figures}")
            for meter in self.meters if figures else ():
                found, tables = _result(meter)
                for metric, value in found.items():
                    if math.isfinite(value):
                        figures[metric] = value
                    else:
                        ranks = str(Figure(metric, averaged, name)) == self.selected
                        so = ": models are ranked by it, so that this evaluation cannot be the best" if ranks else ""
                        logger.warning(
                            "%s %s is %s (as where a class has no sample, or no target counts) and is left out%s",
                            metric,
                            of,
                            value,
                            so,
                        )
                self.tables |= {str(Figure(metric, averaged, name)): table for metric, table in tables.items()}
        self.model.train()
        return {str(Figure(metric, averaged, name)): value for metric, value in figures.items()}

    def _without_targets(self, name: str, where: str) -> dict[str, float]:
        """Log that no target of a set counts. Raises UserError where models are selected by it."""
        line = f"{where} has no target that counts (all are ignored), so that nothing can be measured on it"
        if self.set == next(iter(self.sets)) and Figure.parse(self.selected).set == name:
            raise UserError(f"{line}, and models are selected by it: give it samples with targets, or select by another set")
        logger.warning("%s", line)
        return {}


def _result(meter: Metric) -> tuple[dict[str, float], dict[str, TableRecord]]:
    """Return the figures and the tables of a metric. A figure with a denominator of 0 has no value."""
    try:
        return meter.result()
    except ZeroDivisionError:
        return dict.fromkeys(meter.directions, math.nan), {}


def evaluated_sets(
    data: Splits, steps: tuple[Augmentation, ...], seed: int, about: JsonMapping
) -> dict[str, dict[str, Pipeline]]:
    """Return the sets that a run evaluates: split → pipelines by name. The draws for a set depend on its name alone.

    Several views of a sample differ only by augmentation, so evaluations augment too, by `steps`.
    """
    seeds = {split: rng.mix(seed, EVALUATION, number) for number, split in enumerate(("test", "validation"))}
    return {
        split: {
            name: Pipeline(source, steps, data.normalize, rng.mix(seeds[split], zlib.crc32(name.encode())), **about)
            for name, source in sets.items()
        }
        for split in SPLITS
        if (sets := data.sets(split))
    }
