"""Logs a run: the mean loss and the throughput since the last record."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from drivetrain.core.errors import Diverged
from drivetrain.core.machine import accelerators, guards, process
from drivetrain.core.machine.device import memory_now
from drivetrain.core.options.horizon import Progress
from drivetrain.core.options.protocols import LogWriter
from drivetrain.core.options.selection import Figure
from drivetrain.core.step.microbatch import one_update
from drivetrain.core.step.step import Stream
from drivetrain.core.typed import JsonMapping, StateDict
from drivetrain.engine.flops import Mfu
from drivetrain.engine.noise_scale import NoiseScale
from drivetrain.engine.phased_step import BuiltPhase
from drivetrain.engine.step_timer import StepTimer
from drivetrain.parallel.base import Parallel

logger = logging.getLogger(__name__)

EXPLODED = 100  # times the loss of the first update, or times 1 if that is less
REMEMBERED = 200  # records, to find the begin of a loss's growth
BUSY_S, BUSY = 10.0, 0.5  # seconds of waiting for a core, and their share of the time, from which a warning is logged
REMEDY = "lower optimizer.lr{}, lengthen scheduler.warmup, or set clip=norm"


@dataclass
class TrainingLog:
    """Sums the loss on the device and reads it back once for each record."""

    writers: Sequence[LogWriter]  # loggers and the live progress line; empty on all ranks but 0
    progress: Progress
    parallel: Parallel
    timer: StepTimer
    device: torch.device
    mfu: Mfu
    parts: Callable[[], dict[str, torch.Tensor]] = dict  # running sums, such as the loss's parts, by the names of their figures
    noise: NoiseScale | None = None  # if updates have several micro-batches
    phases: Sequence[BuiltPhase] = ()  # of the updates
    loss_sum: torch.Tensor = field(init=False)  # 0-d: the sum of the updates' losses since the last record

    def __post_init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # update and loss of the last records
        self.loss_sum = torch.zeros((), device=self.device)
        self.first: float | torch.Tensor | None = None  # the loss of the run's first update
        self._began: tuple[float, float] | None = guards.waited_s()  # None after the warning that the cores are busy
        self.restart()

    def restart(self, used: tuple[float, float] | None = None) -> None:
        """Start a new record here and drop the losses summed so far. `used`: the current value of `_used_so_far`."""
        for total in (self.loss_sum, *self._parts().values(), *self._noise_sums()):
            total.zero_()
        for phase in self.phases:
            phase.runs = 0
        progress = self.progress
        self._last = (progress.updates, progress.samples, progress.steps)
        self._used = self._used_so_far() if used is None else used

    def state_dict(self) -> StateDict:
        """Return the state of earlier records that the next ones need."""
        first = None if self.first is None else float(self.first)
        return {"first": first, "noise": self.noise.state_dict() if self.noise is not None else {}}

    def load_state_dict(self, state: JsonMapping) -> None:
        """Load a `state_dict()`."""
        self.first = state.get("first")
        if self.noise is not None:
            self.noise.load_state_dict(state.get("noise", {}))

    def watch(self, stream: Stream) -> Stream:
        """Keep the loss of the run's first update. Nothing waits for the device."""
        yield from one_update(stream)
        if self.first is None and self.progress.steps == 1:  # no record has included it yet
            self.first = self.loss_sum.clone()
        yield from stream

    def exploded(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield a remark on the last evaluation if a loss in it is far above that of the run's first update."""
        losses = [(value, name) for name, value in metrics.items() if Figure.parse(name).metric == "loss"]
        if self.first is None or not losses:
            return
        (loss, name), first = max(losses), float(self.first)
        if loss <= EXPLODED * max(abs(first), 1.0):
            return
        grew = f"{name} is {loss:.4g} at the end, and the loss of the first update was {first:.4g}"
        yield f"the loss has exploded: {grew}: {REMEDY.format('')}"

    def train(self, lr: float) -> None:
        """Write the record of the updates since the last one, if any. Raises Diverged if their loss is not finite."""
        progress, (updates, samples, steps) = self.progress, self._last
        count = progress.steps - steps
        if not count:
            return
        parts, runs = self._parts(), self._runs(count)
        sums = self.parallel.all_reduce_sum(torch.stack([self.loss_sum, *parts.values(), *self._noise_sums()])).cpu()  # one copy
        loss, *values = (float(value) / (count * self.parallel.data_world.size) for value in sums)
        of_use = self._use(used := self._used_so_far())
        self.restart(used)
        self._tell_busy()
        seconds, figures = self.timer.since_last()
        figures |= self.parallel.rank_metrics(seconds, self.timer.wait)
        of_noise: dict[str, float | None] = {}
        if self.noise is not None:
            variance, squared = values[len(parts) :]
            of_noise["noise_scale"] = self.noise.scale(variance, squared, progress.epoch)
        skipped = count - (progress.updates - updates)
        if not math.isfinite(loss) and not skipped:
            raise Diverged(f"the loss is {loss} (updates {updates + 1} to {progress.updates})", self._how_it_diverged(lr))
        self._seen.append((progress.updates, loss))
        self.first = loss if self.first is None and steps == 0 and count == 1 else self.first
        rate = (progress.samples - samples) / seconds if seconds else None
        of_parts = {name: _finite(value * runs(name)) for name, value in zip(parts, values, strict=False)}
        self.write(
            "train", loss=_finite(loss), skipped=progress.skipped, samples=progress.samples, lr=lr,
            samples_per_second=rate, mfu=self.mfu.at(rate) if self.writers else None,
            memory_bytes=memory_now() if self.writers else None, **of_use, **of_parts, **figures, **of_noise,
        )  # fmt: skip

    def _tell_busy(self) -> None:
        """Warn once that this process waits for cores used by others, which slows several threads the most."""
        if self._began is None or not self.writers:
            return
        ran, waited = (now - before for now, before in zip(guards.waited_s(), self._began, strict=True))
        if waited < BUSY_S or waited < BUSY * (ran + waited):
            return
        self._began = None
        threads = torch.get_num_threads()
        fewer = f"set runtime.threads=auto, or 1 ({threads} now, which wait for each other), or " if threads > 1 else ""
        logger.warning(
            "the cores of this machine are busy: the run waited for one for %.0f %% of its time, so its speed says little: "
            "%send other programs", 100 * waited / (ran + waited), fewer,
        )  # fmt: skip

    def _used_so_far(self) -> tuple[float, float]:
        """The seconds of processor time so far, and the time; only if they are recorded."""
        return (process.processor_seconds(), process.now()) if self.writers else (0.0, 0.0)

    def _use(self, used: tuple[float, float]) -> dict[str, float]:
        """The processor cores and the share of the device that were in use since the last record."""
        if not self.writers:
            return {}
        (before, began), share = self._used, accelerators.busy(self.device)
        cores = (used[0] - before) / max(used[1] - began, 1e-9)
        return {"cpu_cores": max(cores, 0.0)} | ({} if share is None else {"gpu_busy": share})

    def _parts(self) -> dict[str, torch.Tensor]:
        """The running sums of the loss's parts, and of the phases."""
        return {**{f"loss_{phase.name}": phase.loss_sum for phase in self.phases}, **self.parts()}

    def _runs(self, count: int) -> Callable[[str], float]:
        """Return the factor for a figure's mean over `count` updates: a phase's mean is over the updates in which it ran."""
        factors = {phase.name: count / phase.runs if phase.runs else math.nan for phase in self.phases}
        return lambda name: next((f for phase, f in factors.items() if f"{name}_".startswith(f"loss_{phase}_")), 1.0)

    def _noise_sums(self) -> Sequence[torch.Tensor]:
        return self.noise.sums.unbind() if self.noise is not None else ()

    def _how_it_diverged(self, lr: float) -> str:
        """The update at which the loss began to grow, and the settings to change."""
        seen = [(update, loss) for update, loss in self._seen if math.isfinite(loss)]
        remedy = REMEDY.format(f" (the rate was {lr:.3g})")
        if not seen:
            return f": {remedy}"
        lowest, last = min(seen, key=lambda at: at[1]), seen[-1]
        grew = f": it grew from {lowest[1]:.4g} at update {lowest[0]} to {last[1]:.4g} at update {last[0]}"
        return f"{grew if last[1] > lowest[1] else ''}: {remedy}"

    def write(self, event: str, **figures: object) -> None:
        """Write one record to all writers."""
        record = {"event": event, "update": self.progress.updates, "epoch": self.progress.epoch, **figures}
        record["time"] = round(process.now(), 3)
        for writer in self.writers:
            writer.log(record)

    def image(self, name: str, path: Path) -> None:
        """Show a picture, a PNG file, in all writers that can."""
        for writer in self.writers:
            writer.log_image(name, self.progress.updates, path)


def _finite(value: float) -> float | None:
    """The value, or None if it is not a number in JSON."""
    return value if math.isfinite(value) else None
