"""Reported times are those of a synchronised clock, on a simulated device whose work is queued."""

import json
import math

import pytest
import torch

from drivetrain.core import lazy
from drivetrain.core.machine.device import Clock, DeviceClock, clock_for
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.engine import build
from drivetrain.engine.out_of_memory import release_memory
from drivetrain.engine.step_timer import StepTimer
from drivetrain.parallel.process_group import RankWork
from tests.support.simulated_device import Queue, reads

ONE = torch.ones(())
STEP, LAUNCH = 0.1, 0.001  # seconds of a step on the device, and to queue it on the host


@pytest.fixture
def queue(monkeypatch):
    """The simulated device, as torch's current accelerator."""
    queue = Queue()
    monkeypatch.setattr(lazy.torch, "Event", queue.event_type())
    monkeypatch.setattr(torch, "Event", queue.event_type())
    monkeypatch.setattr(build, "clock_for", lambda device: DeviceClock(device))
    return queue


@pytest.fixture
def timer():
    return StepTimer(clock=DeviceClock(torch.device("cuda", 0)))


def micro() -> MicroBatch:
    return MicroBatch(ONE, ONE, ONE, True, False)


def steps(timer: StepTimer, queue: Queue, count: int, read: float = 0.0, work: float = STEP) -> None:
    timer.resume()
    for _ in timer.waits(reads(queue, [read] * count, [micro()] * count)):
        queue.launch(work, LAUNCH)
        timer.step()


def test_a_cpu_has_the_hosts_clock():
    assert type(clock_for(torch.device("cpu"))) is Clock
    assert type(clock_for(torch.device("meta"))) is Clock


def test_steps_are_as_long_as_on_the_device(queue, timer):
    steps(timer, queue, 20)
    assert queue.now < 0.1  # the host has queued all of it
    seconds, _ = timer.since_last()
    assert queue.now == pytest.approx(20 * STEP + LAUNCH)
    assert seconds == pytest.approx(20 * STEP + LAUNCH)
    assert timer.percentiles() == pytest.approx((1e3 * STEP, 1e3 * STEP))
    assert timer.steady() == (pytest.approx(19 * STEP), 0.0)
    assert timer.to_first_step - timer._resumed == pytest.approx(STEP + LAUNCH)
    assert queue.events < 70
    for _ in range(9):
        steps(timer, queue, 20)
        timer.since_last()
    assert queue.events < 100, "events are reused"


def test_the_warm_up_of_each_stage_is_left_out(queue, timer):
    timer.begin(0, 12)
    steps(timer, queue, 5)
    timer.since_last()
    queue.now += 0.25  # a slow record: in the rate, and in no step
    timer.pause()
    queue.now += 50.0  # an evaluation
    timer.resume()
    timer.pause()
    timer.warmup = 2
    timer.begin(60, 24)
    queue.now += 50.0  # the next stage is built
    steps(timer, queue, 5, work=2 * STEP)
    timer.since_last()
    assert timer.rate(60 + 5 * 24) == pytest.approx((4 * 12 + 3 * 24) / (4 * STEP + 0.25 + 3 * 2 * STEP))
    assert timer.steady() == (pytest.approx(4 * STEP + 3 * 2 * STEP), 0.0)
    assert timer.samples(60 + 5 * 24) == 4 * 12 + 3 * 24
    assert timer.percentiles() == pytest.approx((1e3 * STEP, 2e3 * STEP))


def test_nobody_waits_for_the_device_within_the_steps(queue, timer):
    steps(timer, queue, 900)
    assert queue.now == pytest.approx(900 * LAUNCH)
    assert 0 < len(timer.steps) <= 900 * LAUNCH / STEP, "those that the device has done are read"


def test_marks_are_read_while_the_device_is_busy(queue, timer):
    """A record then has few to read: an H200 that trained in 0.2 ms a step stood still for 10 ms after 600 of them."""
    queue.depth = 10 * STEP
    steps(timer, queue, 3000)
    assert len(timer.steps) > 2980
    assert queue.events < 3 * 20
    timer.since_last()
    assert len(timer.steps) == 3000
    assert sum(timer.steps) == pytest.approx(3000 * STEP + LAUNCH)


def test_a_full_queue_is_not_waiting_for_data(queue, timer):
    """The reader's time passes while the device has work for a second."""
    queue.depth = 1.0
    steps(timer, queue, 100, read=0.05)
    seconds, figures = timer.since_last()
    assert seconds == pytest.approx(100 * STEP + 0.05 + LAUNCH)
    assert figures["data_wait"] * seconds == pytest.approx(0.05), "the first micro-batch alone"


def test_waiting_for_data_is_when_the_device_has_nothing_to_do(queue, timer):
    steps(timer, queue, 100, read=0.25)
    seconds, figures = timer.since_last()
    assert seconds == pytest.approx(queue.now)
    # The host is as slow as before, but 0.1 s of each read pass while the device computes; launching is no waiting.
    assert figures["data_wait"] * seconds == pytest.approx(queue.idle - 100 * LAUNCH, abs=0.01)
    assert figures["data_wait"] == pytest.approx(0.15 / 0.25, abs=0.01)


def test_copying_to_the_device_is_waiting_for_data(queue, timer):
    def copied():
        for _ in range(50):
            queue.launch(0.3)  # in the step's own stream
            yield micro()

    timer.resume()
    for _ in timer.waits(copied()):
        queue.launch(STEP)
        timer.step()
    assert timer.since_last()[1]["data_wait"] == pytest.approx(0.75)


def test_work_of_a_rank_is_the_devices(queue):
    """Launches that wait for a full queue are no work; what the device does between the marks is."""
    queue.depth = 0.5
    work = RankWork(DeviceClock(torch.device("cuda", 0)))
    module = torch.nn.Identity()
    work.time_forward(module)
    module.register_forward_pre_hook(lambda *_: queue.launch(STEP, LAUNCH))
    for _ in range(40):
        queue.launch(1.0)  # the backward, in which ranks wait for each other
        module(ONE)
    module.eval()(ONE)
    assert work.seconds() == pytest.approx(40 * STEP)


@pytest.fixture
def trainer(make, queue, monkeypatch):
    """A trainer whose steps and evaluations take their time on the simulated device; reading the loss waits for it."""
    trainer = make("updates=null", "epochs=4", "log_every=2", "data.samples=96", "saving=none")  # 8 updates an epoch
    inner, parallel, evaluate = trainer.step, trainer.parallel, trainer.evaluator.evaluate

    class Step:
        update, zero_grad = inner.update, inner.zero_grad

        def micro_batch(self, batch, loss_sum):
            queue.launch(STEP, LAUNCH)
            inner.micro_batch(batch, loss_sum)

    def read_loss(sums):
        queue.synchronize()
        queue.now += 0.5  # what logging itself takes is in the rate, and in no step
        return sums

    def evaluation(stops):
        queue.launch(7.0)
        queue.synchronize()
        return evaluate(stops)

    trainer.step = Step()
    monkeypatch.setattr(parallel, "all_reduce_sum", read_loss)
    monkeypatch.setattr(trainer.evaluator, "evaluate", evaluation)
    return trainer


def test_a_runs_rates_are_those_of_a_synchronised_clock(trainer, queue):
    """12 samples an update; after each log the device has nothing queued, so the next update begins with a launch."""
    trainer.fit()
    rates = [r["samples_per_second"] for r in trainer.log.writers[0] if r["event"] == "train"]
    assert rates == pytest.approx([24 / (2 * STEP + LAUNCH + 0.5)] * 16)
    assert trainer.timer.rate(4 * 96) == pytest.approx((4 * 96 - 12) / (31 * STEP + 15 * LAUNCH + 16 * 0.5))
    seconds, wait = trainer.timer.steady()
    assert seconds == pytest.approx(31 * STEP + 15 * LAUNCH)
    assert wait == pytest.approx(0.0, abs=1e-9)
    assert trainer.timer.percentiles() == pytest.approx((100.0, 101.0))
    assert math.isclose(queue.now, 32 * STEP + 16 * (LAUNCH + 0.5) + 4 * (7.0 + 0.5), rel_tol=1e-9), "the device's whole time"


# --- running out of memory ---


def test_after_running_out_of_memory_it_is_freed_and_shapes_are_forgotten(monkeypatch):
    import weakref

    done = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module())
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    monkeypatch.setitem(__import__("sys").modules, "torch._dynamo", torch._C)  # as after a compilation

    class Module:
        def empty_cache(self):
            done.append(("empty_cache", activations() is None))

    def forward():
        nonlocal activations
        held = torch.zeros(3)
        activations = weakref.ref(held)
        raise RuntimeError("out of memory")

    activations = None
    try:
        forward()
    except RuntimeError as error:
        release_memory(error, torch.device("cuda", 0))
    assert done == [("empty_cache", True), "reset"], "what the error's frames hold goes first"


def test_a_shape_after_running_out_of_memory_is_compiled_as_the_first_was():
    """A second batch size would be compiled for any size, which is slower code."""
    dynamic = []

    def backend(graph, inputs):
        dynamic.append(any(isinstance(given, torch.SymInt) for given in inputs))
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: x * 2, backend=backend)
    compiled(torch.zeros(8, 4))
    release_memory(RuntimeError("out of memory"), torch.device("cpu"))
    compiled(torch.zeros(4, 4))
    torch.compiler.reset()
    assert dynamic == [False, False]


# --- MFU ---


def test_a_run_reports_its_mfu(train):
    result = train("updates=6", "epochs=3", "log_every=2")
    assert result.flops_per_sample > 0
    assert result.mfu > 0
    assert "measured with matrix products" in result.mfu_note
    lines = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    shares = [(r["mfu"], r["samples_per_second"]) for r in lines if r["event"] == "train"]
    peaks = [result.flops_per_sample * rate / mfu for mfu, rate in shares]
    assert peaks == pytest.approx([result.flops_per_sample * result.samples_per_second / result.mfu] * len(peaks))
