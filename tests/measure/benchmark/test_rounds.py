"""Rounds of a benchmark: who is live beside whom, by a simulated memory; and ranks that pause together."""

import contextlib
import importlib
import multiprocessing
import threading
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.core import lazy
from drivetrain.core.machine import process
from drivetrain.core.machine.device import DeviceClock
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.world import World
from drivetrain.loader.auto import Cost
from drivetrain.measure.benchmark import compare as rounds_of
from drivetrain.measure.benchmark import interleave
from drivetrain.measure.benchmark.compare import Comparison, Row, headline, notes_on
from drivetrain.measure.benchmark.interleave import BenchmarkAgent, TimedBlock, Variant, VariantEnded, run_rounds
from drivetrain.measure.benchmark.variants import VariantSpec
from drivetrain.measure.claims import export
from drivetrain.precision.base import Precision
from tests.support.simulated_device import Queue
from tests.support.waiting import LIMIT_S, until

GIB = 2**30


class Device:
    """A device with 80 GiB. Live variants hold theirs; what is too much ends the variant that asked for it."""

    def __init__(self, total: int = 80) -> None:
        self.total, self.held, self.most = total, {}, 0
        self.started: list[str] = []
        self.ran: list[str] = []

    @property
    def free(self) -> int:
        return self.total - sum(self.held.values())


@pytest.fixture
def benchmark(monkeypatch):
    """`benchmark(device, {label: GiB}, rounds)`: the variants after the rounds, run on a simulated device."""

    def run(device: Device, sizes: dict[str, int], rounds: int = 1, told: bool = True) -> dict[str, Variant]:
        def start(variant, round_, block_s):
            device.started.append(variant.label)
            if sizes[variant.label] > device.free:
                raise VariantEnded("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
            device.held[variant.label] = sizes[variant.label]
            device.most = max(device.most, len(device.held))
            variant.memory = interleave.DeviceMemory(sizes[variant.label] * GIB, device.free * GIB if told else None)

        def timed_block(variant):
            assert variant.label in device.held
            device.ran.append(variant.label)
            return TimedBlock(1.0, 1, 100, 0.0, [1.0], 0)

        monkeypatch.setattr(Variant, "start", start)
        monkeypatch.setattr(Variant, "timed_block", timed_block)
        monkeypatch.setattr(Variant, "stop", lambda variant: device.held.pop(variant.label, None))
        variants = {label: Variant(label, None, Path()) for label in sizes}
        run_rounds(list(variants.values()), rounds, 0.1)
        return variants

    return run


@pytest.mark.parametrize(
    ("sizes", "rounds", "told", "most", "ran", "errors"),
    [
        ({"a": 5, "b": 5, "c": 5}, 2, True, 3, "abccba" + "cbaabc", ""),  # there and back
        # Twelve of 20 GiB on a device of 80: beside the baseline two at a time, as a third would leave less than its margin.
        (dict.fromkeys("abcdefghijkl", 20), 4, True, 3, "abccba" + "adeeda", ""),
        # One variant beside the baseline is always tried, whether its reading or its error says that there is no room for two.
        ({"a": 40, "b": 39, "c": 38, "d": 37}, 2, True, 2, "abba" + "acca", ""),
        ({"a": 40, "b": 39, "c": 38, "d": 37}, 2, False, 2, "abba" + "acca", ""),
        ({"a": 30, "b": 60, "c": 30}, 3, True, 2, "acca", "b"),  # one that does not fit alone fails, and the others go on
        ({"a": 100, "b": 5, "c": 5}, 3, True, 0, "", "a"),  # a baseline that fails ends it before any other variant is timed
    ],
)
def test_as_many_variants_are_live_as_fit_beside_the_baseline(benchmark, sizes, rounds, told, most, ran, errors):
    device = Device()
    variants = benchmark(device, sizes, rounds, told)
    assert "".join(device.ran).startswith(ran)
    assert (device.most, device.held) == (most, {})
    assert "".join(label for label, variant in variants.items() if "out of memory" in (variant.error or "")) == errors
    for label, variant in variants.items():
        assert len(variant.blocks) == (0 if label in errors or "a" in errors else rounds)
        assert label == "a" or all(block.updates == 2 for block in variant.blocks)
    assert device.started.count("a") == (1 if "a" in errors else rounds), "the baseline stays"
    assert all(device.started.count(label) == 1 for label in errors)
    assert "a" not in errors or device.started == ["a"]


def test_a_variant_that_fails_otherwise_is_not_started_again(benchmark, monkeypatch):
    device = Device()
    monkeypatch.setattr(interleave, "ran_out", lambda reason: False)
    assert benchmark(device, {"a": 5, "b": 5, "c": 100})["c"].error
    assert device.started == ["a", "b", "c"]


def test_a_variant_that_was_killed_between_two_blocks_is_said(tmp_path):
    """Its pipe is broken where the next block is asked for."""
    ended, ours = SimpleNamespace(pid=0, exitcode=-9, join=lambda: None), multiprocessing.Pipe()
    variant = Variant("a", None, tmp_path)
    variant._process, variant._round_dir, (variant._connection, theirs) = ended, tmp_path, ours
    variant._signal = lambda number: None
    theirs.close()
    with pytest.raises(VariantEnded, match="its process ended with code -9"):
        variant.timed_block()


def test_the_margin_counts_the_largest_variant_so_far_or_its_own():
    live = [interleave.DeviceMemory(20, 60), interleave.DeviceMemory(30, 35)]
    assert not interleave.fits(None, live)
    assert interleave.fits(25, live)
    assert interleave.fits(None, [interleave.DeviceMemory(20, None)])
    assert interleave.fits(None, [])


def test_memory_is_read_of_any_device(monkeypatch):
    used, free = interleave.read_memory(torch.device("cpu"), World(local_size=2))
    assert used > 2**24
    assert free is None or free > 0
    monkeypatch.setattr(interleave, "free_memory", lambda device: 7)
    monkeypatch.setattr(interleave.torch, "get_device_module", lambda device: SimpleNamespace(max_memory_reserved=lambda: 5))
    assert interleave.read_memory(torch.device("xpu"), World()) == (5 + interleave.CONTEXT, 7)
    monkeypatch.setattr(interleave.torch, "get_device_module", lambda device: SimpleNamespace(driver_allocated_memory=lambda: 6))
    assert interleave.read_memory(torch.device("mps"), World()) == (6 + interleave.CONTEXT, 7)


# --- the agent in a variant's processes ---

STEP = 0.1


def fake_trainer(queue: Queue, rank: int = 0, size: int = 1) -> SimpleNamespace:
    world = World(rank, size, rank, size)
    parallel = SimpleNamespace(world=world, data_world=world, finish_collectives=lambda: None)
    return SimpleNamespace(
        device=torch.device("cpu"), timer=SimpleNamespace(warmup=1), parallel=parallel, stream_watchers=[], endless=lambda: None,
        compile_seconds=lambda: None, progress=SimpleNamespace(epoch=0, updates=0), drop_last=False, batch=SimpleNamespace(
            size=lambda epoch: 4, order=SimpleNamespace(length=8), updates=lambda samples, epoch, drop_last: 2,
        ), model=torch.nn.Identity(),
        train_data=SimpleNamespace(source=range(8)), queue=queue, precision=Tf32Here(),
    )  # fmt: skip


def test_an_epochs_short_last_update_is_warmed_up_too(make):
    """What is compiled or recorded for its shape would be so within a timed block."""
    words = ("batch.global_batch=12", "updates=null", "epochs=1", "data.drop_last=false")
    trainer = make("data.samples=30", *words)
    micros = list(interleave.short_updates(trainer))
    assert [(len(micro.x), micro.last, micro.epoch_end) for micro in micros] == [(6, True, False)] * 4
    assert not list(interleave.short_updates(make("data.samples=36", *words)))


def test_a_mean_far_from_its_median_is_said():
    even, uneven = (
        Variant(name, None, Path(), blocks=[TimedBlock(s, 10, 10, 0.0, [0.1] * 10, 0)]) for name, s in (("a", 1.2), ("b", 5.0))
    )
    (line,) = notes_on([even, uneven])
    assert "b: an update takes 5.0 times its median" in line


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
    monkeypatch.setattr(interleave, "clock_for", lambda device: DeviceClock(torch.device("cuda", 0)))
    monkeypatch.setattr(interleave, "synchronize", queue.synchronize)
    clock = SimpleNamespace(perf_counter=lambda: queue.now, monotonic=lambda: queue.now, sleep=lambda s: None)
    monkeypatch.setattr(interleave, "time", clock)
    return queue


def test_a_block_and_its_steps_are_those_of_a_synchronised_clock(queue, monkeypatch):
    """The host queues ten steps ahead: its clock would make the steps, and so the block's length, a hundred times wrong."""
    ours, theirs = multiprocessing.Pipe()
    trainer = fake_trainer(queue)
    monkeypatch.setattr(process, "started", queue.now - 20.0)  # the run has been built for 20 s
    importlib.import_module("torch._dynamo.utils").counters.clear()  # of what other tests in this process have compiled
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


def test_all_ranks_stand_still_before_rank_0_reports():
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
    assert list(notes_on([SimpleNamespace(label="precision=tf32", facts=facts, blocks=[])])) == [
        "precision=tf32: rounds nothing here"
    ]
    assert updates == {0: 4, 1: 4, 2: 4}
    assert sorted(finished) == [0, 1, 2]
    ours.send(20)
    assert ours.poll(LIMIT_S)
    assert ours.recv().samples == 20 * 4 * 3
    assert updates == {0: 27, 1: 27, 2: 27}  # a lead of 3


def test_before_a_pause_the_watchdog_of_an_accelerators_collectives_gets_to_see_that_they_are_done(monkeypatch):
    slept = []
    monkeypatch.setattr(interleave, "time", SimpleNamespace(sleep=slept.append))
    for device, ranks in (("cpu", 2), ("cuda", 1), ("cuda", 2)):
        ours, theirs = multiprocessing.Pipe()
        trainer = fake_trainer(Queue(), 0, ranks)
        trainer.device = torch.device(device)
        mine = BenchmarkAgent(theirs, ranks)
        for _, to_first in mine._pipes:
            to_first.send(None)
        ours.send(5)
        assert mine._pause(trainer, {}) == 5
    assert slept == [interleave.WATCHDOG_S]


# --- made-up rounds: what a variant is worth with its start-up, and whether it needs more of them; one start is measured ---

BATCH = 10


def variant(starts: list[float], step_s: float, label: str = "variant", **facts: Any) -> Any:
    """A variant whose rounds have these starts, and updates that take `step_s`."""
    block = SimpleNamespace(rate=BATCH / step_s, seconds=20 * step_s, updates=20, step_s=[step_s], data_wait_s=0.0, peak_memory=1)
    facts |= {"global_batch": BATCH, "samples": 1000}
    return SimpleNamespace(label=label, starts=starts, blocks=[block] * len(starts), facts=facts, error=None, stopped_after=None,
                           job=object())  # fmt: skip


def weighed(updates: int | None, *variants: Any) -> list[Row]:
    rows: list[Row] = []
    for each in variants:
        rows.append(Row.of(VariantSpec(each.label, [], None, []), each, rows[0] if rows else None, updates))
    return rows


def answer(rows: list[Row]) -> str:
    return headline(Comparison(rows, [], [], SimpleNamespace(quality=False), {}, 1.0))


def timed(*rates: float, seconds: float = 1.0, wait: float = 0.0) -> Any:
    """A variant of whose run no length is known."""
    blocks = [SimpleNamespace(rate=r, step_s=[0.1], data_wait_s=wait, seconds=seconds, peak_memory=1) for r in rates]
    return SimpleNamespace(label="", blocks=blocks, facts={}, error=None, stopped_after=None, starts=[], job=None)


PLAIN = variant([1.0] * 7, 0.1, "plain")
COMPILED = variant([501.0, *[11.0] * 6], 0.05, "compiled", compiled_anew=True)


def test_a_cost_pays_from_the_steps_on_that_make_up_for_its_start():
    late, plain = Cost(start=11.0, step=0.05), Cost(start=1.0, step=0.1)
    assert late.of(200) == plain.of(200) == pytest.approx(21.0)
    assert late.pays_after(plain) == 200
    assert Cost(0.5, 0.05).pays_after(plain) == 0
    assert plain.pays_after(late) is None
    assert Cost(1.0, 0.1).pays_after(plain) is None


def test_a_first_start_that_compiles_is_told_beside_those_with_filled_caches():
    plain, compiled = weighed(300, PLAIN, COMPILED)
    assert (plain.start_s, plain.first_start_s, compiled.start_s, compiled.first_start_s) == (1.0, None, 11.0, 501.0)
    assert (compiled.pays_after, compiled.first_pays_after) == (200, 10_000)
    assert compiled.run_s == pytest.approx(26.0)
    assert compiled.whole_run.middle == pytest.approx(31 / 26)
    assert [*compiled.figures().values()][-3:] == ["11.0 s (uncompiled: 501.0)", "200 updates (uncompiled: 10,000)", "26.0 s"]
    assert weighed(300, PLAIN, variant([12.0, *[11.0] * 6], 0.05))[1].first_start_s is None


@pytest.mark.parametrize(("updates", "worth"), [(165, False), (200, False), (201, True), (20_000, True)])
def test_the_runs_own_length_decides(updates, worth):
    plain, compiled = weighed(updates, PLAIN, COMPILED)
    assert compiled.ratio.low == pytest.approx(2.0)
    assert (compiled.gain.low > 1) is worth
    assert bool(compiled.pays_too_late) is not worth
    assert ("compiled is 2.00 × as fast as plain" in answer([plain, compiled])) is worth


@pytest.mark.parametrize(
    ("updates", "variants", "said"),
    [
        (
            165, [PLAIN, COMPILED],
            "No variant is measurably faster than plain.",
        ),
        (
            300, [PLAIN, COMPILED],
            "compiled is 2.00 × as fast as plain (2.00 to 2.00).",
        ),
        (20_000, [PLAIN, COMPILED], "compiled is 2.00 × as fast as plain (2.00 to 2.00)."),
        (  # what starts sooner may win with slower updates
            20, [variant([11.0] * 7, 0.05, "workers"), variant([1.0] * 7, 0.1, "sync")],
            "sync is 4.00 × as fast as workers for the whole run, as it starts sooner (4.00 to 4.00).",
        ),
    ],
)  # fmt: skip
def test_the_answer_weighs_the_start_by_the_runs_length(updates, variants, said):
    assert answer(weighed(updates, *variants)) == said


def test_where_the_length_is_not_known_the_updates_decide():
    _, compiled = weighed(None, PLAIN, COMPILED)
    assert compiled.gain == compiled.ratio
    assert (compiled.run_s, compiled.pays_after, compiled.pays_too_late) == (None, 200, "")


def test_a_start_is_later_only_where_the_rounds_agree():
    assert rounds_of.later_start([9.0, 1.2, 1.3, 1.1], [1.0, 1.0, 1.0, 1.0]) == pytest.approx(0.2)
    assert rounds_of.later_start([9.0, 1.2, 0.9, 1.1], [1.0, 1.0, 1.0, 1.0]) == 0.0
    assert rounds_of.later_start([9.0], [1.0]) == 8.0


@pytest.mark.parametrize(("updates", "no_gain", "behind"), [(165, ["compiled"], []), (None, [], ["plain"])])
def test_rounds_drop_a_variant_by_the_whole_run(updates, no_gain, behind):
    """Its updates are twice as fast, and the run is over before that pays."""
    assert [row.label for row in rounds_of.no_gain(weighed(updates, PLAIN, COMPILED))] == no_gain
    assert [row.label for row in rounds_of.behind(weighed(updates, COMPILED, PLAIN))] == behind


def test_a_recipe_says_what_the_run_takes_and_when_it_pays():
    plain, compiled = weighed(300, PLAIN, COMPILED)
    assert export.of_the_run(compiled, plain) == [
        "the run of 300 updates takes 26.0 s, start-up included, instead of 31.0 s",
        "it pays after 10,000 updates where its kernels are not compiled yet, as in a first run",
    ]
    assert export.of_the_run(*weighed(None, COMPILED, PLAIN)) == []


def test_a_variant_that_has_too_few_rounds_has_no_interval_in_the_file():
    rows = weighed(300, variant([1.0], 0.1), variant([2.0], 0.05))
    found = Comparison(rows, [], [], SimpleNamespace(quality=False), {}, 1.0).as_dict()["rows"][1]["whole_run"]
    assert found == [pytest.approx(31 / 17), None, None]


def test_a_variant_stops_when_its_ratio_is_known_to_two_per_cent():
    base, near = [100.0 + n % 2 for n in range(8)], [200.0 + n % 3 / 2 for n in range(8)]
    wide = [200.0, 210.0, 190.0, 205.0, 195.0, 220.0, 185.0, 200.0]
    rows = weighed(None, timed(*base), timed(*near), timed(*wide))
    assert rounds_of.precise(rows) == [rows[1]]
    few = weighed(None, *(timed(*rates[: rounds_of.MIN_ROUNDS - 1]) for rates in (base, near)))
    assert rounds_of.precise(few) == []  # narrow by chance


@pytest.mark.parametrize(("slower", "rounds", "dropped"), [(2, 2, True), (1, 2, False), (2, 3, False), (3, 4, True)])
def test_a_variant_is_dropped_where_it_lost_clearly_more_than_half(slower, rounds, dropped):
    rows = weighed(None, timed(*[100.0] * rounds), timed(*[90.0] * slower, *[110.0] * (rounds - slower)))
    assert (rounds_of.no_gain(rows) == rows[1:]) is dropped
    assert (rounds_of.behind(rows) == rows[1:]) is dropped


def test_the_baseline_is_never_dropped_and_what_is_near_the_best_stays():
    rows = weighed(None, *(timed(*[rate] * 4) for rate in (100.0, 200.0, 198.0, 150.0)))
    assert rounds_of.behind(rows) == rows[3:]


@pytest.mark.parametrize(("cost", "told", "faster"), [(0.0, "no difference", False), (0.05, "", False), (-0.05, "", True)])
def test_a_against_a_is_no_difference_and_a_planted_cost_is_seen(cost, told, faster):
    """Rounds drift together by 30 %, and each variant has 0.5 % of noise of its own."""
    random, rounds = Random(0), 20
    drift = [random.uniform(0.7, 1.0) for _ in range(rounds)]
    base, other = ([100 * share * d * random.gauss(1, 0.005) for d in drift] for share in (1.0, 1 / (1 + cost)))
    rows = weighed(None, timed(*base), timed(*other))
    rows[0].label, rows[1].label = "a", "b"
    assert rows[1].interval().partition("  ")[2] == told
    assert rows[1].ratio.low < 1 / (1 + cost) < rows[1].ratio.high
    assert rows[1].ratio.differs is bool(cost)
    assert answer(rows).startswith("b is 1.05 × as fast as a (" if faster else "No variant is measurably faster than a.")


def test_a_variant_that_stopped_is_compared_with_its_own_rounds():
    """The machine became twice as slow after the variant had stopped: that changes no ratio."""
    base, stopped = timed(*[100.0] * 6, *[50.0] * 6), timed(*[200.0] * 6)
    assert weighed(None, base, stopped)[1].ratio.middle == pytest.approx(2.0)


def test_the_share_of_waiting_is_that_of_the_whole_time():
    assert weighed(None, timed(1.0, 1.0, seconds=4.0, wait=1.0))[0].data_wait == 0.25


CACHED = """
import time
import torch

class Cached(torch.utils.data.Dataset):
    classes = ("a", "b")

    def __init__(self, split, cached):
        self.pause = 0.0 if cached else 0.004
        if cached:
            time.sleep(0.5)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.pause)
        return torch.full((8,), index / 64), index % 2
"""


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "worth"), [(2, False), (4000, True)])
def test_a_planted_start_counts_by_the_runs_length(command, tiny, updates, worth, own_module):
    """A set that reads its samples ahead: half a second at the start, and updates that are many times as fast."""
    own_module("cached_set", CACHED)
    words = ["data=own", "data.target=cached_set.Cached", "trust=[cached_set]", "data.kwargs.cached=false,true"]
    lengths = [f"updates={updates}", "epochs=100000", "rounds=7", "block_s=0.1"]
    done, found = command("compare", *tiny(*words, *lengths))
    plain, cached = found["rows"]
    assert plain["run_updates"] == cached["run_updates"] == updates
    assert cached["ratio"][1] > 1
    assert cached["start_s"] - plain["start_s"] > 0.4  # of the training set alone: the others are read before
    assert 2 < cached["pays_after"] < 4000
    assert (cached["whole_run"][1] > 1) is worth
    assert ("No variant is measurably faster" in done.stdout) is not worth
