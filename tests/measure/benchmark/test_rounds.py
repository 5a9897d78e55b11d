"""Rounds of a benchmark: who is live beside whom, by a simulated memory; and ranks that pause together."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drivetrain.core import lazy, process
from drivetrain.core.clock import DeviceClock
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.world import World
from drivetrain.measure.benchmark import agent
from drivetrain.measure.benchmark.agent import BenchmarkAgent, TimedBlock
from drivetrain.measure.benchmark.comparison import _without_effect
from drivetrain.measure.benchmark.interleave import Arm, ArmEnded, run_rounds
from drivetrain.precision.base import Precision
from tests.support.simulated_device import Queue
from tests.support.waiting import LIMIT_S, until

GIB = 2**30


class Device:
    """A device with 80 GiB. Live arms hold theirs; what is too much ends the arm that asked for it."""

    def __init__(self, total: int = 80) -> None:
        self.total, self.held, self.most = total, {}, 0
        self.started: list[str] = []
        self.ran: list[str] = []

    @property
    def free(self) -> int:
        return self.total - sum(self.held.values())


@pytest.fixture
def benchmark(monkeypatch):
    """`benchmark(device, {label: GiB}, rounds)`: the arms after the rounds, run on a simulated device."""

    def run(device: Device, sizes: dict[str, int], rounds: int = 1, told: bool = True) -> dict[str, Arm]:
        def start(arm, round_=0):
            device.started.append(arm.label)
            if sizes[arm.label] > device.free:
                arm._failed = True
                return
            arm._failed = False
            device.held[arm.label] = sizes[arm.label]
            device.most = max(device.most, len(device.held))

        def warm_up(arm, block_s):
            if arm._failed:
                raise ArmEnded("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
            arm.memory = agent.Reading(sizes[arm.label] * GIB, device.free * GIB if told else None)

        def timed_block(arm):
            assert arm.label in device.held
            device.ran.append(arm.label)
            return TimedBlock(1.0, 1, 100, 0.0, [1.0], 0)

        monkeypatch.setattr(Arm, "start", start)
        monkeypatch.setattr(Arm, "warm_up", warm_up)
        monkeypatch.setattr(Arm, "timed_block", timed_block)
        monkeypatch.setattr(Arm, "stop", lambda arm: device.held.pop(arm.label, None))
        arms = {label: Arm(label, None, Path()) for label in sizes}
        run_rounds(list(arms.values()), rounds, 0.1)
        return arms

    return run


def test_arms_that_fit_are_live_together_and_run_there_and_back(benchmark):
    device = Device()
    benchmark(device, {"a": 5, "b": 5, "c": 5}, rounds=2)
    assert device.most == 3
    assert "".join(device.ran) == "abccba" + "cbaabc"
    assert device.held == {}


def test_many_arms_are_capped_by_free_memory_in_every_round(benchmark):
    """Twelve of 20 GiB on a device of 80: beside the baseline two at a time, as a third would leave less than its margin."""
    device = Device()
    arms = benchmark(device, dict.fromkeys("abcdefghijkl", 20), rounds=4)
    assert [arm.error for arm in arms.values()] == [None] * 12
    assert all(len(arm.blocks) == 4 for arm in arms.values())
    assert all(block.updates == 2 for label, arm in arms.items() if label != "a" for block in arm.blocks)
    assert device.most == 3
    assert "".join(device.ran).startswith("abccba" + "adeeda")
    assert device.held == {}


@pytest.mark.parametrize("told", [True, False], ids=["by its reading", "by its error"])
def test_one_arm_beside_the_baseline_is_always_tried(benchmark, told):
    device = Device()
    arms = benchmark(device, {"a": 40, "b": 39, "c": 38, "d": 37}, rounds=2, told=told)
    assert [arm.error for arm in arms.values()] == [None] * 4
    assert device.most == 2
    assert device.started.count("a") == 2, "the baseline stays"


def test_an_arm_that_does_not_fit_alone_fails_and_the_others_go_on(benchmark):
    device = Device()
    arms = benchmark(device, {"a": 30, "b": 60, "c": 30}, rounds=3)
    assert "out of memory" in arms["b"].error
    assert [len(arms[label].blocks) for label in "abc"] == [3, 0, 3]
    assert device.started.count("b") == 1


def test_a_baseline_that_fails_ends_the_benchmark_before_any_other_arm_is_timed(benchmark):
    device = Device()
    arms = benchmark(device, {"a": 100, "b": 5, "c": 5}, rounds=3)
    assert "out of memory" in arms["a"].error
    assert device.started == ["a"]
    assert [(arm.error, arm.blocks) for label, arm in arms.items() if label != "a"] == [(None, [])] * 2


def test_an_arm_that_fails_otherwise_is_not_started_again(benchmark, monkeypatch):
    device = Device()
    sizes = {"a": 5, "b": 5, "c": 5}

    def run():
        return benchmark(device, sizes)

    monkeypatch.setattr(agent, "ran_out", lambda reason: False)
    sizes["c"] = 100
    assert run()["c"].error
    assert device.started == ["a", "b", "c"]


def test_the_margin_counts_the_largest_arm_so_far_or_its_own(monkeypatch):
    live = [agent.Reading(20, 60), agent.Reading(30, 35)]
    assert not agent.fits(None, live)
    assert agent.fits(25, live)
    assert agent.fits(None, [agent.Reading(20, None)])
    assert agent.fits(None, [])


def test_memory_is_read_of_any_device(monkeypatch):
    used, free = agent.read_memory(torch.device("cpu"), World(local_size=2))
    assert used > 2**24
    assert free is None or free > 0
    monkeypatch.setattr(agent, "free_memory", lambda device: 7)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(max_memory_reserved=lambda: 5))
    assert agent.read_memory(torch.device("xpu"), World()) == (5 + agent.CONTEXT, 7)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(driver_allocated_memory=lambda: 6))
    assert agent.read_memory(torch.device("mps"), World()) == (6 + agent.CONTEXT, 7)


# --- the agent in an arm's processes ---

STEP = 0.1


def fake_trainer(queue: Queue, rank: int = 0, size: int = 1) -> SimpleNamespace:
    world = World(rank, size, rank, size)
    parallel = SimpleNamespace(world=world, data_world=world, finish_collectives=lambda: None)
    return SimpleNamespace(
        device=torch.device("cpu"), timer=SimpleNamespace(warmup=1), parallel=parallel, stream_watchers=[], endless=lambda: None,
        compile_seconds=lambda: None, batch=SimpleNamespace(size=lambda epoch: 4), model=torch.nn.Identity(),
        train_data=SimpleNamespace(source=range(8)), queue=queue, precision=Tf32Here(),
    )  # fmt: skip


class Tf32Here(Precision):
    def notice(self):
        return "rounds nothing here"


def micros():
    one = torch.ones(())
    while True:
        yield MicroBatch(torch.zeros(4, 1), one, one, True, False)


@pytest.fixture
def queue(monkeypatch):
    """A simulated device, with a clock that the agent reads."""
    queue = Queue(depth=1.0)
    monkeypatch.setattr(lazy.torch, "Event", queue.event_type())
    monkeypatch.setattr(agent, "clock_for", lambda device: DeviceClock(torch.device("cuda", 0)))
    monkeypatch.setattr(agent, "synchronize", queue.synchronize)
    clock = SimpleNamespace(perf_counter=lambda: queue.now, monotonic=lambda: queue.now, sleep=lambda s: None)
    monkeypatch.setattr(agent, "time", clock)
    return queue


def test_a_block_and_its_steps_are_those_of_a_synchronised_clock(queue, monkeypatch):
    """The host queues ten steps ahead: its clock would make the steps, and so the block's length, a hundred times wrong."""
    ours, theirs = multiprocessing.Pipe()
    trainer = fake_trainer(queue)
    monkeypatch.setattr(process, "started", queue.now - 20.0)  # the run has been built for 20 s
    BenchmarkAgent(theirs, 1).attach(trainer)
    (watch,) = trainer.stream_watchers
    stream = watch(micros())
    ours.send(50)

    def step():
        next(stream)
        queue.launch(STEP, 0.001)

    for _ in range(4 + 8 + 50):  # warm-up, lead, block
        step()
    facts = ours.recv()
    assert facts["step_s"] == pytest.approx(STEP)
    assert facts["start_s"] == pytest.approx(20.0, abs=0.01)  # without the four updates of the warm-up
    assert facts["compiled_anew"] is False
    ours.send(50)
    step()
    block = ours.recv()
    assert block.seconds == pytest.approx(50 * STEP + 0.001)
    assert block.samples == 200
    assert sorted(block.step_s)[25] == pytest.approx(STEP)
    assert sum(block.step_s) == pytest.approx(block.seconds)
    assert block.data_wait_s == pytest.approx(0.0)


def test_all_ranks_stand_still_before_rank_0_reports(monkeypatch):
    """On the host, each after its last collective, and after the same update."""
    ours, theirs = multiprocessing.Pipe()
    shared = BenchmarkAgent(theirs, 3)
    finished: list[int] = []
    updates = dict.fromkeys(range(3), 0)
    rank_2_may_go_on = threading.Event()

    def run(rank: int) -> None:
        trainer = fake_trainer(Queue(), rank, 3)
        trainer.parallel.finish_collectives = lambda: finished.append(rank)
        mine = BenchmarkAgent.__new__(BenchmarkAgent)
        mine.__dict__.update(vars(shared))  # as after a fork
        mine.attach(trainer)
        with contextlib.suppress(EOFError):  # the end of the test
            for _ in trainer.stream_watchers[0](micros()):
                if rank == 2 and updates[rank] == 3:
                    rank_2_may_go_on.wait(LIMIT_S)
                updates[rank] += 1

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(3)]
    for thread in ranks:
        thread.start()
    until(lambda: {0, 1} <= {*finished})
    assert not ours.poll(0), "rank 0 reports though rank 2 still computes"
    rank_2_may_go_on.set()
    assert ours.poll(LIMIT_S)
    facts = ours.recv()
    assert facts["global_batch"] == 4
    assert _without_effect([SimpleNamespace(label="precision=tf32", facts=facts)]) == ["precision=tf32: rounds nothing here"]
    assert updates == {0: 4, 1: 4, 2: 4}
    assert sorted(finished) == [0, 1, 2]
    ours.send(20)
    assert ours.poll(LIMIT_S)
    assert ours.recv().samples == 20 * 4 * 3
    assert updates == {0: 27, 1: 27, 2: 27}  # a lead of 3


def test_before_a_pause_the_watchdog_of_an_accelerators_collectives_gets_to_see_that_they_are_done(monkeypatch):
    slept = []
    monkeypatch.setattr(agent, "time", SimpleNamespace(sleep=slept.append))
    for device, ranks in (("cpu", 2), ("cuda", 1), ("cuda", 2)):
        ours, theirs = multiprocessing.Pipe()
        trainer = fake_trainer(Queue(), 0, ranks)
        trainer.device = torch.device(device)
        mine = BenchmarkAgent(theirs, ranks)
        for _, to_first in mine._pipes:
            to_first.send(None)
        ours.send(5)
        assert mine._pause(trainer, {}) == 5
    assert slept == [agent.WATCHDOG_S]
