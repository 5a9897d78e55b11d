"""One run's step, looked at from inside: where its time goes, and which lines of the user's own code take it."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain.core.device import synchronize
from drivetrain.measure.benchmark.interleave import ENDLESS, WARM
from drivetrain.measure.profile import roofline
from drivetrain.measure.profile.lines import WATCHED, Line, Stream, lines, one, update
from drivetrain.measure.profile.utilization import occupied
from drivetrain.saving import checkpoint_io


@dataclass
class Findings:
    """What the examination found. Milliseconds an update."""

    step_ms: float
    phases: dict[str, float]
    lines: list[Line]
    evaluation_s: float
    saving_s: float | None  # of one checkpoint; None where none is kept
    operations: int  # of an update, all of them
    updates: int  # of an epoch
    larger: float | None  # samples a second with four times the micro-batch, to those now
    roofline: roofline.Roofline
    micro_batch: int
    read_ms: float | None  # of reading one micro-batch
    device: str
    occupied: dict[str, float]  # shares of an update's time


def examine(trainer: Any, look_s: float) -> Findings:
    """Run a finished trainer's steps, `look_s` seconds in each of several ways."""
    trainer.epochs = ENDLESS
    trainer.model.train()
    stream = Stream(trainer.loader.stream(trainer.train_data, trainer._requests(), trainer.device, trainer.memory_format))
    for _ in range(trainer.timer.warmup + WARM):
        update(trainer, stream)
    whole = _whole(trainer, stream, look_s)
    phases, read_ms = _phases(trainer, stream, look_s)
    device = occupied(trainer, stream)
    own, operations = lines(trainer, stream, look_s)
    micro, micros = one(stream)
    device_can = roofline.measure(trainer, micro, micros)
    larger = _larger(trainer, micro, look_s)
    evaluation, saving = _evaluation(trainer), _saving(trainer)
    updates = trainer.batch.updates(len(trainer.train_data.source), 0, trainer.drop_last)
    return Findings(
        whole, phases, own, evaluation, saving, operations, updates, larger, device_can, len(micro.x), read_ms,
        trainer.device.type, device,
    )  # fmt: skip


def _whole(trainer: Any, stream: Stream, look_s: float) -> float:
    """Milliseconds of an update that nobody watches."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < look_s or count < WATCHED:
        update(trainer, stream)
        count += 1
    synchronize(trainer.device)
    return 1e3 * (time.perf_counter() - began) / count


def _phases(trainer: Any, stream: Stream, look_s: float) -> tuple[dict[str, float], float | None]:
    """Milliseconds of each phase of an update, the device waited for in between; and those of reading a micro-batch."""
    spent: defaultdict[str, float] = defaultdict(float)
    read: list[float] = []
    began, count = time.perf_counter(), 0

    def done(name: str, since: float) -> float:
        synchronize(trainer.device)
        now = time.perf_counter()
        spent[name] += now - since
        return now

    fused = "micro" in vars(trainer)  # the whole step is one graph: its phases are not apart
    while time.perf_counter() - began < look_s or count < WATCHED:
        mark = time.perf_counter()
        for micro in stream:
            mark = done("data wait", mark)
            if micro.seconds is not None:
                read.append(micro.seconds)
            if fused:
                trainer.micro(micro)
                mark = done("step", mark)
            else:
                with trainer.parallel.sync(trainer.forward, micro.last):
                    with trainer.precision.autocast():
                        output = trainer.forward(micro.x)
                        mark = done("forward", mark)
                        loss = trainer.loss(output, micro.y)
                        mark = done("loss", mark)
                    trainer.precision.backward(loss, micro.weight)
                mark = done("backward", mark)
            if micro.last:
                break
        trainer.update()
        trainer.ema.update()
        trainer.zero_grad()
        done("update", mark)
        count += 1
    return {name: 1e3 * seconds / count for name, seconds in spent.items()}, 1e3 * sum(read) / len(read) if read else None


def _larger(trainer: Any, micro: Any, look_s: float) -> float | None:
    """Samples a second of forward and backward with four times the micro-batch, to those with one: in turns, the median."""

    def seconds(x: torch.Tensor, y: torch.Tensor) -> float:
        began = time.perf_counter()
        with trainer.precision.autocast():
            loss = trainer.loss(trainer.model(x), y)
        trainer.precision.backward(loss, micro.weight)
        trainer.zero_grad()
        synchronize(trainer.device)
        return time.perf_counter() - began

    try:
        batches = [tuple(torch.cat([t] * times) for t in (micro.x, micro.y)) for times in (1, 4)]
        ratios: list[float] = []
        until = time.perf_counter() + look_s
        while time.perf_counter() < until or len(ratios) <= WATCHED:
            one, four = (seconds(*batch) for batch in batches)
            ratios.append(4 * one / four)
        return statistics.median(ratios[1:])  # the first pair has warmed up
    except (RuntimeError, TypeError):  # out of memory, or inputs that are no plain tensors
        return None


def _evaluation(trainer: Any) -> float:
    """Seconds of one evaluation, from its first batches."""
    source = trainer.test_data.source
    batches = len(trainer.batch.evaluation(source, trainer.parallel.data_world))
    trainer.eval_batches = min(batches, trainer.eval_batches or batches, 8)
    began = time.perf_counter()
    trainer.evaluate()
    return (time.perf_counter() - began) * batches / max(1, trainer.eval_batches)


def _saving(trainer: Any) -> float | None:
    """Seconds of keeping one checkpoint."""
    if not trainer.saving.active:
        return None
    with tempfile.TemporaryDirectory(dir=trainer.run_dir) as folder:
        began = time.perf_counter()
        checkpoint_io.save(Path(folder), 0, trainer.model.state_dict(), trainer.state())
        return time.perf_counter() - began
