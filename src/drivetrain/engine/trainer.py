"""The loop: fit, step, evaluate. It sees no config and no technique by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from drivetrain.core.device import is_out_of_memory
from drivetrain.core.errors import Diverged, Interrupted
from drivetrain.core.microbatch import MicroBatch, Request
from drivetrain.core.progress import Progress
from drivetrain.core.signals import StopFlag
from drivetrain.engine.step_timer import StepTimer
from drivetrain.saving import checkpoint_io
from drivetrain.saving.writer import Writer

SAVE, STOP = 1, 2  # what the ranks agree on after an update; the higher wins
STATEFUL = ("scheduler", "precision", "ema", "batch")  # restored in this order, after the optimizer
MOST_SKIPS = 50  # updates skipped in a row before the run counts as diverged


@dataclass
class Trainer:
    """One rank of a run. `build.build` fills it."""

    model: torch.nn.Module  # plain: evaluated and saved under its own names
    forward: Callable[[torch.Tensor], torch.Tensor]  # the same model, compiled and wrapped as asked for
    infer: Callable[[torch.Tensor], torch.Tensor]  # the model as evaluation calls it
    loss: Any
    optimizer: torch.optim.Optimizer
    eval_weights: Callable[[], AbstractContextManager[None]]  # the weights to evaluate and to save stand in the model
    scheduler: Any
    precision: Any
    parallel: Any
    clip: Callable[[], None]
    ema: Any
    zero_grad: Callable[[], None]
    batch: Any
    loader: Any
    train_data: Any  # Pipeline
    test_data: Any  # Pipeline
    device: torch.device
    memory_format: torch.memory_format
    seed: int
    drop_last: bool
    epochs: int
    max_updates: int  # over the whole run
    log_every: int
    evaluate_every: int
    eval_batches: int | None
    saving: Any
    run_dir: Path
    writer: Writer
    sinks: list[Any]  # loggers and the terminal; empty on all ranks but 0
    said: list[str]  # what the build has to say
    watch: Callable[[Any], Any] = iter  # what looks at the training stream on its way, as a generator
    progress: Progress = field(default_factory=Progress)
    timer: StepTimer = field(default_factory=StepTimer)

    def fit(self, stop: StopFlag | None = None) -> None:
        """Train to the end. Raises Diverged, and Interrupted when `stop` is raised."""
        self._stop = stop or StopFlag()
        self.writer.start()
        self.model.train()
        self.scheduler.step(self.progress.updates)
        self.saving.start(self.progress.updates)
        self._loss = torch.zeros((), device=self.device)  # summed since the last log; stays on the device
        self._logged = (self.progress.updates, self.progress.samples, self.progress.updates + self.progress.skipped)
        self._skips, self._steps = 0, self.progress.updates + self.progress.skipped
        self.timer.first_samples = self.progress.samples + self.timer.warmup * self.batch.size(self.progress.epoch)
        while self.progress.updates < self.max_updates:
            stream = self.watch(self.loader.stream(self.train_data, self._requests(), self.device, self.memory_format))
            self.timer.resume()
            try:
                with closing(stream):
                    self._run(self.timer.waits(stream))
                break
            except RuntimeError as error:
                self.loader.raise_if_worker_died(error)
                self._make_room(error)
        if self.progress.evaluated != self.progress.updates:
            self._evaluate_and_log()
            self._save()
        self.writer.wait()

    def _run(self, stream: Iterator[MicroBatch]) -> None:
        for micro in stream:
            self._loss.addcmul_(self.micro(micro), micro.weight)
            if not micro.last:
                continue
            if self.update():
                self.progress.updates += 1
                self.scheduler.step(self.progress.updates)
                self.ema.update()
                self._skips = 0
            else:
                self._skip()
            self.zero_grad()
            if self._after_update(micro.epoch_end):
                return

    def micro(self, micro: MicroBatch) -> torch.Tensor:
        """Forward and backward of one micro-batch; its loss, without history."""
        with self.parallel.sync(self.forward, micro.last):
            with self.precision.autocast():
                loss = self.loss(self.forward(micro.x), micro.y)
            self.precision.backward(loss, micro.weight)
        return loss.detach()

    def update(self) -> bool:
        """Update the weights by the gradients; False if that was skipped."""
        return self.precision.step(self.optimizer, self.clip)

    def _requests(self) -> Iterator[Request]:
        start = self.progress.epoch
        for epoch in range(start, self.epochs):
            yield from self.batch.requests(
                len(self.train_data.source), self.seed, epoch, self.parallel.data, self.drop_last, device=self.device,
                skip=self.progress.window if epoch == start else 0, order=getattr(self.train_data.source, "order", None),
            )  # fmt: skip

    def _make_room(self, error: RuntimeError) -> None:
        """Out of memory: the same update again, in micro-batches half as large. Any other error goes on its way."""
        world = self.parallel.world
        if not is_out_of_memory(error) or world.size > 1 or not self.batch.halve(world):
            raise error
        self.zero_grad()
        self._loss.zero_()
        self._logged = (self.progress.updates, self.progress.samples, self._steps)
        self.log_event("remark", text=f"out of memory: on with {self.batch.micro_batch(world)} samples at once")

    def _skip(self) -> None:
        self.progress.skipped += 1
        self._skips += 1
        if self._skips >= MOST_SKIPS:
            raise Diverged(f"{MOST_SKIPS} updates in a row had gradients that are not finite (update {self.progress.updates})")

    def _after_update(self, epoch_end: bool) -> bool:
        """Bookkeeping at an update's boundary; True when the run is done."""
        self.timer.step()
        progress = self.progress
        progress.window += 1
        self._steps += 1
        want = STOP if self._stop.raised else SAVE if self.saving.due(progress.updates) else 0
        agreed = self.parallel.all_reduce_flag(want)
        done = progress.updates >= self.max_updates
        if not (epoch_end or agreed or done or self._steps % self.log_every == 0):
            return False
        progress.samples = self.batch.consumed(len(self.train_data.source), progress.epoch, progress.window, self.drop_last)
        self._log()
        if epoch_end:
            progress.epoch, progress.window = progress.epoch + 1, 0
            if progress.epoch % self.evaluate_every == 0 or progress.epoch == self.epochs:
                self._evaluate_and_log()
        if epoch_end or agreed:
            self._save()
        if agreed == STOP and not done:
            self.writer.wait()
            raise Interrupted(f"stopped by a signal at update {progress.updates}", saved=self.saving.active)
        self.timer.resume()
        return done

    def _log(self) -> None:
        """Read the loss back, once for all updates since the last time, and tell the sinks."""
        progress = self.progress
        updates, samples, steps = self._logged
        windows = self._steps - steps
        loss = float(self.parallel.total(self._loss)) / (windows * self.parallel.data.size)
        self._loss.zero_()
        self._logged = (progress.updates, progress.samples, self._steps)
        seconds, reading = self.timer.since_last()
        reading |= self.parallel.reading(seconds)
        skipped = windows - (progress.updates - updates)
        if not math.isfinite(loss) and not skipped:
            raise Diverged(f"the loss is {loss} (updates {updates + 1} to {progress.updates})")
        self.log_event(
            "train", loss=loss if math.isfinite(loss) else None, skipped=progress.skipped, samples=progress.samples,
            lr=self.optimizer.param_groups[0]["lr"],
            samples_per_second=(progress.samples - samples) / seconds if seconds else None, **reading,
        )  # fmt: skip

    def log_event(self, event: str, **numbers: Any) -> None:
        """One record to all sinks."""
        record = {"event": event, "update": self.progress.updates, "epoch": self.progress.epoch, **numbers}
        for sink in self.sinks:
            sink.log(record)

    def _evaluate_and_log(self) -> None:
        self.parallel.broadcast_buffers(self.model)
        with self.eval_weights():
            metrics = self.evaluate()
        if self.ema.active:
            with self.ema.swapped():
                self.parallel.broadcast_buffers(self.model)  # each rank averaged its own
                metrics |= {f"ema_{name}": value for name, value in self.evaluate().items()}
        progress = self.progress
        if not all(map(math.isfinite, metrics.values())):
            raise Diverged(f"an evaluation at update {progress.updates} is not finite: {metrics}")
        name, better = self.loss.best
        if not progress.best or better(metrics[name], progress.best[name]) != progress.best[name]:
            progress.best = {**metrics, "update": progress.updates}
        progress.evaluated, progress.final = progress.updates, metrics
        self.scheduler.evaluated(metrics)
        self.log_event("evaluate", **metrics)

    def evaluate(self) -> dict[str, float]:
        """The metrics over the test data, every sample once on any number of ranks: sums are reduced, not means."""
        self.model.eval()
        sums = torch.zeros(len(self.loss.metrics) + 1, dtype=torch.float64, device=self.device)
        data, together = self.parallel.data, self.parallel.together
        mine = self.batch.of_evaluation(self.test_data.source, data, self.eval_batches, self.device, together)
        stream = self.loader.stream(self.test_data, mine, self.device, self.memory_format)
        with self.parallel.evaluating():
            for micro in stream:
                with self.precision.autocast():
                    output = self.infer(micro.x)
                sums += self.loss.sums(output, micro.y) * micro.weight
        *totals, count = self.parallel.total(sums).tolist()
        self.model.train()
        return {name: total / count for name, total in zip(self.loss.metrics, totals, strict=True)}

    def _save(self) -> None:
        self.writer.save(self)
        self.saving.start(self.progress.updates)

    def state(self) -> dict[str, Any]:
        """Everything but the weights that a resumed run needs."""
        return {
            "progress": asdict(self.progress),
            "optimizer": self.optimizer.state_dict(),
            **{part: getattr(self, part).state_dict() for part in STATEFUL},
            "random": self.parallel.gather(checkpoint_io.random_state()),
        }

    def restore(self, weights: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Go on from a checkpoint: weights and state as one process has them."""
        weights, state = self.parallel.shard_state_dict(weights, state)
        self.model.load_state_dict(weights)
        self.progress = Progress(**state["progress"])
        checkpoint_io.load_optimizer(self.optimizer, state["optimizer"])
        for part in STATEFUL:
            getattr(self, part).load_state_dict(state[part])
        checkpoint_io.restore_random_state(state["random"], self.parallel.stream())
