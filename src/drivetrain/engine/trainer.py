"""The training loop. It knows no config, and no technique by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from drivetrain.batch.base import Batch
from drivetrain.compile import Compile
from drivetrain.core.errors import PEER_GONE, CallbackError, Diverged, Interrupted, UserError
from drivetrain.core.machine.device import is_out_of_memory, reads_device_on_purpose
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.options.horizon import Progress
from drivetrain.core.options.selection import Selection
from drivetrain.core.step import streams
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.modules import buffers_kept
from drivetrain.core.step.step import Made, Step, Stream, StreamWatcher
from drivetrain.core.step.trees import map_tensors
from drivetrain.core.typed import StateDict, Stateful
from drivetrain.core.user.state import OwnState
from drivetrain.data.base import fingerprint
from drivetrain.ema.base import Ema
from drivetrain.engine.callbacks import Callbacks
from drivetrain.engine.evaluator import Evaluator
from drivetrain.engine.out_of_memory import release_memory
from drivetrain.engine.step_timer import StepTimer
from drivetrain.engine.training_log import TrainingLog
from drivetrain.loader.base import Loader, Pipeline
from drivetrain.parallel.base import Parallel
from drivetrain.precision.base import Precision
from drivetrain.saving import checkpoint_io
from drivetrain.saving.options import Saving
from drivetrain.saving.sharded_checkpoint import by_name
from drivetrain.saving.writer import Writer
from drivetrain.scheduler.base import Scheduler
from drivetrain.stop.base import Stop

SAVE, STOP, FAIL = 1, 2, 3  # flags that are all-reduced after an update, and at batches of an evaluation; the higher wins
MAX_SKIPS = 50  # updates skipped in a row before the run counts as diverged
STOP_S = 0.1  # the time for several ranks to agree to stop: two exchanges

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """Trains one rank of a run. `engine.build` constructs it."""

    model: torch.nn.Module  # not wrapped: evaluated and saved under its own parameter names
    step: Step
    selection: Selection
    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    stopping: Stop
    precision: Precision
    parallel: Parallel
    ema: Ema
    batch: Batch
    loader: Loader
    train_data: Pipeline
    taken: Pipeline  # the same, as training reads it: a stream is used up
    evaluator: Evaluator
    device: torch.device
    memory_format: torch.memory_format
    seed: int
    drop_last: bool
    epochs: int
    max_updates: int  # over the whole run
    log_every: int
    evaluate_every: int
    saving: Saving
    run_dir: Path
    writer: Writer
    progress: Progress
    timer: StepTimer
    log: TrainingLog
    callbacks: Callbacks
    owned: OwnState  # of the user's objects
    rank_seed: int  # of this rank's random streams
    compiler: Compile
    compile_seconds: Callable[[], float | None]  # spent compiling so far, in all stages
    stream_watchers: list[StreamWatcher] = field(default_factory=list)  # wrap the training stream, in order
    _open: Made | None = field(default=None, init=False)  # whether the last update was made, until that is read
    _agreed_every: int = field(default=0, init=False)  # updates after which several ranks agree; 0: not known yet

    def fit(self, stop: StopFlag | None = None) -> None:
        """Train to the end of the run. Raises Diverged, and Interrupted when `stop` is raised."""
        self._stop, self._skips_in_a_row = stop or StopFlag(), 0
        self.writer.start()
        if self.saving.active and self.parallel.world.rank == 0:
            self.writer.trains_on(fingerprint(self.train_data.source))
        self.model.train()
        with self.owned.untouched():
            self.evaluator.check()
        self.saving.restart(self.progress.updates)
        self.log.restart()
        self.timer.begin(self.progress.samples, self.batch.size(self.progress.epoch))
        if self.progress.evaluation_due:
            self._evaluate_and_save()
        while self.progress.updates < self.max_updates and not self.stopping.reason:
            stream = self._stream()
            for watcher in self.stream_watchers:
                stream = watcher(stream)
            self.timer.resume()
            try:
                with closing(stream):
                    self._train(self.timer.waits(stream))
                break
            except RuntimeError as error:
                self.loader.raise_if_worker_died(error)
                self._halve_micro_batch(error)
        if self.progress.evaluated != self.progress.updates:
            self.progress.evaluation_due = True
            self._evaluate_and_save()
        self.writer.wait()

    def _train(self, stream: Iterator[MicroBatch]) -> None:
        step, loss_sum, progress = self.step, self.log.loss_sum, self.progress
        for batch in stream:
            if batch.last:  # not after an update: the log has the update's own rate, and a plateau may lower the next one
                self.scheduler.step(progress.updates)
            step.micro_batch(batch, loss_sum)  # a graph of the whole step updates here
            if not batch.last:
                continue
            self._settle()
            self._open, progress.updates = step.update(), progress.updates + 1
            if self._open is True or self._open is False:
                self._settle()
            step.zero_grad()
            if self._after_update(batch.epoch_end):
                return
        if progress.epoch < self.epochs:
            raise RuntimeError(f"the loader's stream ended after {progress.updates} of {self.max_updates} updates")

    def requests(self) -> Iterator[Request]:
        """Yield this rank's micro-batches from the current progress to the end of the run."""
        start = self.progress.epoch
        for epoch in range(start, self.epochs):
            yield from self.batch.requests(
                self.seed, epoch, self.parallel.data_world, self.drop_last, self.progress.window if epoch == start else 0
            )

    def endless(self) -> None:
        """Remove the run's end and its evaluations, so that a benchmark decides when to stop."""
        self.max_updates = self.epochs = self.evaluate_every = 2**62

    def _settle(self) -> None:
        """Read whether the last update overflowed, which counts as made until then. The weights have not changed since then."""
        made, self._open = self._open, None
        if made is None:
            return
        if made:
            self.ema.update()
            self._skips_in_a_row = 0
            return
        self.progress.updates -= 1
        self.progress.skipped += 1
        self.scheduler.step(self.progress.updates)  # the rate of the current update
        self._skips_in_a_row += 1
        if self._skips_in_a_row >= MAX_SKIPS:
            raise Diverged(f"{MAX_SKIPS} updates in a row had gradients that are not finite (update {self.progress.updates})")

    @reads_device_on_purpose
    def _after_update(self, epoch_end: bool) -> bool:
        """Log, evaluate, save and stop where due. Returns True when the run is done."""
        self.timer.step(self.compiler.waits())
        progress = self.progress
        progress.window += 1
        counted = self.saving.counted(progress.updates)
        if counted or epoch_end or progress.updates >= self.max_updates or progress.steps % self.log_every == 0:
            self._settle()
            counted = self.saving.counted(progress.updates)
        agreed = self.agree() if progress.steps % (self._agreed_every or 1) == 0 else 0
        agreed = max(agreed, SAVE if counted else 0)  # all ranks count alike, without communication
        done = progress.updates >= self.max_updates
        if not (epoch_end or agreed or done or progress.steps % self.log_every == 0):
            return False
        self.record()
        if epoch_end:
            progress.epoch, progress.window = progress.epoch + 1, 0
            progress.evaluation_due = progress.epoch % self.evaluate_every == 0 or progress.epoch == self.epochs
        if epoch_end or agreed:
            self.timer.pause()
            self._evaluate_and_save(agreed)
        self.timer.resume()
        return done or self.stopping.reason is not None

    @reads_device_on_purpose
    def record(self) -> None:
        """Log the updates since the last record."""
        self._settle()
        self.compiler.settle()
        progress = self.progress
        progress.samples = self.batch.consumed(self.batch.order.length, progress.epoch, progress.window, self.drop_last)
        self.log.train(self.optimizer.param_groups[0]["lr"])
        if not self._agreed_every and self.parallel.world.size > 1 and (times := self.timer.percentiles()):
            slowest = max(self.parallel.gather_object(times[1] / 1e3), default=0.0)  # rank 0 has them all
            self._agreed_every = self.parallel.broadcast_object(max(1, int(STOP_S / 2 / max(slowest, 1e-9))))

    def agree(self) -> int:
        """Return the highest flag over all ranks: FAIL, STOP, SAVE or 0."""
        wanted = STOP if self._stop.raised else SAVE if self.saving.due() else 0
        return self.parallel.all_reduce_flag(FAIL if self.callbacks.error else wanted)

    def read(self, requests: Iterable[Request] | None = None) -> Stream:
        """Yield the micro-batches of requests for training samples, by default of those from here to the end of the run."""
        return self.loader.stream(
            self.train_data, self.requests() if requests is None else requests, self.device, self.memory_format
        )

    def _stream(self) -> Stream:
        """Yield the loader's micro-batches. A single process that got a signal to stop saves instead of waiting for the next.

        So does one whose reader is stuck or was killed. Several ranks would have to agree on this while some wait for others.
        """
        batches = self.loader.stream(self.taken, self.requests(), self.device, self.memory_format)
        between = alone = self.parallel.world.size == 1
        while True:
            if between:
                StopFlag.can_save_now(True)
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Interrupted as error:
                if not (between and self.progress.updates):
                    raise
                self.record()
                self.save()
                self._interrupt(str(error))
            finally:
                if between:
                    StopFlag.can_save_now(False)
            between = alone and batch.last
            yield batch

    def _evaluate_and_save(self, agreed: int = 0) -> None:
        """Evaluate where that is due, and save.

        `agreed` is the flag that the ranks have agreed on: SAVE, STOP or FAIL. Raises Interrupted, or the error of a callback,
        where they agree to stop, also at a batch of the evaluation. A missing evaluation stays due: the resumed run begins with
        it.
        """
        progress, wrong = self.progress, ""
        if progress.evaluation_due and agreed < STOP:
            try:
                agreed, wrong = self._evaluate(agreed)
            except UserError:  # the data cannot be evaluated: keep the training
                self.save()
                self.writer.wait()
                raise
        self.save()
        if wrong:
            self._interrupt(wrong)
        if agreed >= STOP and (progress.evaluation_due or progress.updates < self.max_updates):
            self.writer.wait()
            if agreed == FAIL:
                raise self.callbacks.error or CallbackError(PEER_GONE)  # of another rank
            where = "before the evaluation of" if progress.evaluation_due else "at"
            self._interrupt(f"stopped by a signal {where} update {progress.updates}")

    def _evaluate(self, agreed: int) -> tuple[int, str]:
        """Evaluate.

        Return the flag that the ranks agreed on meanwhile, and the reason why a single process got no data, if that stopped it.
        """
        alone = self.parallel.world.size == 1

        def stops() -> bool:
            nonlocal agreed
            agreed = max(agreed, self.agree())
            return agreed >= STOP

        StopFlag.can_save_now(alone)
        try:
            self.record_evaluation(stops)
        except Interrupted as error:
            if agreed < STOP and not alone:  # the loader's error: the other ranks continue the evaluation
                raise
            return agreed, "" if agreed >= STOP else str(error)
        finally:
            StopFlag.can_save_now(False)
        self.progress.evaluation_due = False
        return agreed, ""

    def record_evaluation(self, stops: Callable[[], bool]) -> None:
        """Evaluate, and pass the figures to every part that uses them. Raises Interrupted where `stops` says so at a batch."""
        metrics, evaluator = self.evaluator.evaluate(stops), self.evaluator
        self.progress.record_evaluation(metrics, self.selection.place(metrics), evaluator.tables)
        self.log.write("evaluate", set=evaluator.set, **metrics)
        self.scheduler.evaluated(metrics)
        self.stopping.evaluated(metrics)

    def _interrupt(self, reason: str) -> NoReturn:
        self.writer.wait()
        raise Interrupted(reason, saved=self.saving.active)

    def _halve_micro_batch(self, error: RuntimeError) -> None:
        """After running out of memory, prepare to repeat the update in micro-batches half as large. Raises any other error."""
        world = self.parallel.world
        if not is_out_of_memory(error) or world.size > 1 or not self.batch.halve(world):
            raise error
        self._settle()
        self.step.zero_grad()
        self.log.restart()
        release_memory(error, self.device)
        logger.warning("out of memory: training continues with %d samples at once", self.batch.micro_batch(world))

    def forward_backward(self, size: int) -> None:
        """Run forward and backward on the largest micro-batch of `size` samples. Leaves the gradients in place."""
        indices = self.batch.largest(len(self.train_data.source), size)
        request = Request(0, indices, 1.0)
        loss_sum = torch.zeros((), device=self.device)
        for batch in self.read([request]):
            self.step.micro_batch(batch, loss_sum)

    def preallocate(self) -> None:
        """Allocate the memory of the largest micro-batch now. Buffers, gradients and random states are restored."""
        with buffers_kept(self.model), streams.apart():
            self.forward_backward(self.batch.micro_batch(self.parallel.data_world))
        self.step.zero_grad()
        self.parallel.rank_metrics(0.0, self.timer.wait)  # reset: the dry run does not count as work of a rank

    @reads_device_on_purpose
    def save(self) -> None:
        """Save the state after the last update, with the callbacks' state."""
        self.writer.save(self)
        self.saving.restart(self.progress.updates)
        self.callbacks.save()

    def _stateful(self) -> dict[str, Stateful]:
        """The parts with a state in the order of their restoring; progress and optimizer are restored before."""
        return {
            "scheduler": self.scheduler, "precision": self.precision, "ema": self.ema, "batch": self.batch,
            "stopping": self.stopping, "loader": self.loader, "log": self.log, "owned": self.owned,
        }  # fmt: skip

    def state(self) -> StateDict:
        """Return everything except the weights that a resumed run needs. Called on all ranks."""
        return {
            "progress": self.progress.state_dict(),
            "optimizer": by_name(self.optimizer.state_dict()),
            **{name: part.state_dict() for name, part in self._stateful().items()},
            "random": {rank: drawn for rank, drawn in enumerate(self.parallel.gather_object(self._drawn())) if drawn},
        }

    def _drawn(self) -> dict[str, torch.Tensor]:
        """Return the states of this rank's random streams that were drawn from."""
        seeded = self._seeded()
        return {kind: now for kind, now in streams.state().items() if kind not in seeded or not now.equal(seeded[kind])}

    def _seeded(self) -> dict[str, torch.Tensor]:
        """Return the states of this rank's random streams that follow from the seed."""
        with streams.apart():
            streams.seed_all(self.rank_seed)
            return streams.state()

    def restore(self, weights: dict[str, torch.Tensor], state: StateDict) -> None:
        """Continue from a checkpoint. Weights and state are those of the full, unsharded model."""
        drawn = state["random"].get(self.parallel.rng_rank(), {})
        weights, state = self.parallel.shard_state_dict(weights, {**state, "random": drawn})
        state = map_tensors(torch.clone, state)  # reads only this rank's part of the checkpoint's file, and releases the file
        self.model.load_state_dict(weights)
        self.progress.load_state_dict(state["progress"])
        checkpoint_io.load_optimizer(self.optimizer, state["optimizer"])
        for name, part in self._stateful().items():
            part.load_state_dict(state.get(name, {}))
        streams.restore({**self._seeded(), **state["random"]})
