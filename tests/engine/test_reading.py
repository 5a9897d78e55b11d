"""The cost of reading and how far ahead it was are measured, whoever reads; a device that waits is told of, with what helps."""

import json
import multiprocessing
import time
import weakref

import pytest
import torch

from drivetrain.core.machine.device import Clock
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.tensors import Tensors
from drivetrain.engine import input_checks
from drivetrain.engine.step_timer import ReadTimes, StepTimer
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.auto import AutoLoader
from drivetrain.loader.dali import Dali
from drivetrain.loader.device import DeviceLoader, Resident
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from tests.support.waiting import until

CPU, ONE = torch.device("cpu"), torch.ones(())
READ = 0.02  # seconds


class Slow(Tensors):
    """Every batch takes READ seconds; `read` counts them, whichever process reads."""

    def __init__(self):
        super().__init__(torch.zeros(64, 1, 2, 2), torch.zeros(64, dtype=torch.int64))
        self.read = multiprocessing.get_context("fork").Value("i", 0)

    def fetch(self, indices):
        time.sleep(READ)
        fetched = super().fetch(indices)
        with self.read:
            self.read.value += 1
        return fetched


def micro(ready, seconds=0.01):
    return MicroBatch(ONE, ONE, ONE, True, False, seconds, ready)


def test_depth_is_how_many_lay_ready_at_each_asking():
    reading = ReadTimes()
    for asked, ready in ((1.0, 1.5), (2.0, 1.7), (3.0, 1.8), (4.0, 1.9), (5.0, 5.2)):
        reading.record(asked, micro(ready))
    # At 1 none, at 2 the three of 1.7 to 1.9, at 3 two, at 4 one, at 5 none.
    assert reading.since_last() == {"decode_ms": pytest.approx(10), "queue_depth": pytest.approx(6 / 5)}
    assert reading.since_last() == {}
    reading.record(6.0, micro(5.9))
    assert reading.since_last()["queue_depth"] == 1


def test_readers_that_cannot_tell_are_left_out():
    reading = ReadTimes()
    reading.record(1.0, micro(0.0, None))
    assert reading.since_last() == {}


@pytest.mark.parametrize(
    ("loader", "ahead", "most"),
    [
        (Loader(), 0, 0),
        (Threads(2, prefetch_factor=3), 3, 6),
        (Workers(2, prefetch_factor=2), 3, 4),
        (DeviceLoader("threads", 2), 2, 4),
    ],
    ids=["sync", "threads", "workers", "device"],
)
def test_every_reader_tells_its_time_and_what_lay_ready(loader, ahead, most):
    """A step takes as long as the readers take to be `ahead`: no clock decides how many lie ready."""
    source, batches, seconds = Slow(), 16, []
    requests = [Request(0, torch.arange(4), 1.0) for _ in range(batches)]
    clock = StepTimer()
    stream = loader.stream(Pipeline(source, (), None, 0), requests, CPU, torch.contiguous_format)
    for taken, batch in enumerate(clock.waits(stream), 1):
        seconds.append(batch.seconds)
        until(lambda: source.read.value >= min(batches, taken + ahead))  # noqa: B023
        clock.step()
    told = clock.since_last()[1]
    assert min(seconds) >= READ
    assert told["decode_ms"] == pytest.approx(1e3 * sum(seconds) / batches)
    least = sum(max(0, min(ahead - 2, batches - taken - 1)) for taken in range(1, batches)) / batches  # two may be on their way
    assert least <= told["queue_depth"] <= most
    assert (told["queue_depth"] > 0) == (ahead > 0)


def test_metrics_have_them(train):
    records = [json.loads(line) for line in (train("log_every=1").run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["event"] == "train":
            assert record["decode_ms"] > 0
            assert record["queue_depth"] == 0  # loader=sync


def test_evaluation_is_not_counted(make):
    trainer = make("log_every=1")
    trainer.evaluator.metrics()
    assert trainer.timer.reading.since_last() == {}


# --- the word ---


def watched(caplog, steps: list[tuple[float, float]], help_by: str | None) -> list[str]:
    """The lines on steps of (wait, work) seconds."""
    caplog.clear()
    now = 0.0

    class Set(Clock):
        mark = staticmethod(lambda: now)

    def read():
        nonlocal now
        for wait, _ in steps:
            now += wait
            yield micro(0.0)

    timer = StepTimer(clock=Set())
    stream = timer.waits(input_checks.check_waiting(read(), timer, help_by))
    for (_, work), _ in zip(steps, stream, strict=False):
        now += work
        timer.step()
    next(stream, None)
    return list(caplog.messages)


def test_a_device_that_waits_is_told_of_once_with_what_helps(caplog):
    said = watched(caplog, [(9.0, 0.1), *[(0.06, 0.04)] * 200], "loader=threads reads ahead")
    assert said == ["the device waits for data 60 % of the time: loader=threads reads ahead"]
    assert watched(caplog, [(0.06, 0.04)] * 200, None) == ["the device waits for data 60 % of the time"]


@pytest.mark.parametrize(
    "steps",
    [[(0.01, 0.09)] * 300, [(9.0, 0.1), *[(0.0, 0.1)] * 300], [(0.06, 0.04)] * 15, [(0.0006, 0.0004)] * 300],
    ids=["little", "the start alone", "too few", "too short"],
)
def test_nothing_is_said_for_little(steps, caplog):
    assert watched(caplog, steps, "x") == []


def test_it_says_what_helps_this_loader(monkeypatch):
    for module in ("threads", "base", "auto"):
        monkeypatch.setattr(f"drivetrain.loader.{module}.usable_cores", lambda: 4)

    class Files(Slow):
        decodes_files = True

    def helps(loader, source):
        return loader.advice(Pipeline(source, (), None, 0))

    memory, files = Slow(), Files()
    assert helps(Loader(), memory) == "loader=threads reads ahead while the device works"
    assert helps(Threads(2), memory) == "loader.num_threads=4, one for each core"
    assert "loader.num_workers=4" in helps(Workers(2), files)
    assert "data=packed" in helps(Workers(2), files)
    assert "num" not in helps(Threads(4), files)
    assert helps(Threads("auto"), memory) is helps(Resident(), memory) is helps(AutoLoader(), memory) is None
    assert helps(DeviceLoader("threads", 2), memory) == "loader.num_readers=4, one for each core"
    assert "loader.reader=threads" in helps(DeviceLoader("sync"), memory)
    assert "data=packed" in helps(Dali(), files)


def test_a_run_that_waits_is_told(make, monkeypatch, caplog):
    trainer = make("epochs=40", "updates=60")
    monkeypatch.setattr(trainer.timer, "steady", lambda: (3.0, 0.9))
    trainer.fit()
    said = [line for line in caplog.messages if "waits for data" in line]
    assert said == ["the device waits for data 90 % of the time: loader=threads reads ahead while the device works"]


@pytest.mark.parametrize("loader", ["sync", "threads", "workers", "device", "resident"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_holds_no_batch_that_it_has_trained_on(make, monkeypatch, loader, steps):
    """A batch of images that lives on takes its memory from the device for the whole run."""
    monkeypatch.setattr(input_checks, "MIN_STEPS", 2)
    monkeypatch.setattr(input_checks, "MIN_SECONDS", 0.0)
    words = ["batch=accumulate", f"batch.accumulation_steps={steps}"] if steps > 1 else []
    words += ["loader.num_threads=2"] if loader == "threads" else []
    trainer = make("data=digits", "epochs=40", "updates=40", f"loader={loader}", *words)
    came, alive = [], []

    def keep(stream):
        for batch in stream:
            came.append(weakref.ref(batch.x))
            yield batch

    trainer.stream_watchers.insert(0, keep)
    after = trainer._after_update
    monkeypatch.setattr(trainer, "_after_update", lambda end: (alive.append(sum(r() is not None for r in came)), after(end))[1])
    trainer.fit()
    assert len(alive) == 40
    assert max(alive[20:]) <= (3 if loader == "threads" else 1)  # a thread has its last batch until it has the next
