"""Every loader yields the same micro-batches in the same order, wherever they are read."""

import faulthandler
import io
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_structure

import drivetrain
from drivetrain.augment.erasing import RandomErasing
from drivetrain.augment.geometry import FlipCrop, RandomResizedCrop
from drivetrain.batch import Batch
from drivetrain.batch.base import Accumulate
from drivetrain.batch.bucketed import Bucketed
from drivetrain.core.errors import DataError, Interrupted, UserError
from drivetrain.core.machine import signals
from drivetrain.core.machine.guards import usable_cores
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.order import shuffled
from drivetrain.core.step import streams, trees
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.source import Source
from drivetrain.core.world import World
from drivetrain.data import Normalize, Tensors
from drivetrain.data.own import OwnCollate, OwnDataset, OwnSource, Stack
from drivetrain.data.text import Texts
from drivetrain.engine.evaluator import Evaluator
from drivetrain.loader import Loader, Pipeline, threads, workers
from drivetrain.loader.auto import AutoLoader, Cost, CostPerBatch
from drivetrain.loader.base import in_memory_format
from drivetrain.loader.device import DeviceLoader, Resident
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from tests.support import command, drawing_sets
from tests.support.sets import images_of
from tests.support.to_end import run_to_end
from tests.support.waiting import LIMIT_S, until

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores: on purpose
CPU = torch.device("cpu")
LOADERS = {
    "workers(1)": lambda: Workers(num_workers=1),
    "workers(3)": lambda: Workers(num_workers=3, prefetch_factor=3),
    "workers(2), not persistent": lambda: Workers(num_workers=2, persistent_workers=False),
    "threads(1)": lambda: Threads(num_threads=1),
    "threads(3)": lambda: Threads(num_threads=3, prefetch_factor=4),
    "device, threads": lambda: DeviceLoader(num_readers=2),
    "device, workers": lambda: DeviceLoader(reader="workers", num_readers=1),
    "device, sync": lambda: DeviceLoader(reader="sync"),
    "resident": Resident,
    "auto": AutoLoader,
}


def pipeline() -> Pipeline:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(255, (29, 3, 8, 8), dtype=torch.uint8, generator=generator)
    source = Tensors(images, torch.arange(29))
    return Pipeline(source, (FlipCrop(),), Normalize([100.0] * 3, [50.0] * 3), 0)


def requests(epochs: int = 2):
    """Two epochs of 29 samples in updates of 8 and micro-batches of 4, the tail included."""
    batch = Accumulate(global_batch=8, accumulation_steps=2)
    for epoch in range(epochs):
        yield from batch.over(shuffled(29)).requests(0, epoch, World(), drop_last=False)


def read(loader: Loader, wanted=None) -> list[MicroBatch]:
    return list(loader.stream(pipeline(), requests() if wanted is None else wanted, CPU, torch.contiguous_format))


def test_no_more_workers_are_started_than_there_are_batches(monkeypatch):
    """An evaluation of one batch starts one process, and one of none starts none."""
    started, start = [], workers._start
    monkeypatch.setattr(workers, "_start", lambda loader: started.append(loader.num_workers) or start(loader))
    given = list(requests(1))
    for wanted in ([], given[:1], given, iter(given)):
        assert len(read(Workers(num_workers=2), wanted)) == (len(wanted) if isinstance(wanted, list) else len(given))
    assert started == [1, 2, 2]


@pytest.mark.parametrize("name", ["workers(1)", "threads(1)", "device, sync", "resident"])
def test_a_sample_that_comes_again_is_augmented_anew_by_every_loader(name):
    batch = Batch(global_batch=12).over(shuffled(29, times=3))
    expected, got = (read(loader, batch.requests(0, 0, World(), True)) for loader in (Loader(), LOADERS[name]()))
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
    x, y = torch.cat([m.x for m in got]).unflatten(0, (-1, 3)), torch.cat([m.y for m in got]).view(-1, 3)
    assert (y == y[:, :1]).all()
    assert all(not torch.equal(views[0], views[1]) for views in x)


@pytest.mark.parametrize("name", LOADERS)
def test_every_loader_gives_what_the_loop_reads_itself(name):
    before = torch.get_rng_state()
    expected, got = read(Loader()), read(LOADERS[name]())
    assert torch.equal(torch.get_rng_state(), before), "the model's random stream is not touched"
    assert len(expected) == len(got) == 16
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert (a.last, a.epoch_end, float(a.weight)) == (b.last, b.epoch_end, float(b.weight))
    assert sum(m.epoch_end for m in got) == 2
    epochs = [torch.cat([m.y for m in got[:8]]), torch.cat([m.y for m in got[8:]])]
    assert all(sorted(epoch.tolist()) == list(range(29)) for epoch in epochs)
    assert not torch.equal(*epochs)  # workers that persist have learnt of the new epoch


class Pid(Source):
    """A source whose samples say which process read them."""

    def __len__(self) -> int:
        return 29

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((len(indices), 1), os.getpid()), torch.full((len(indices),), torch.get_num_threads())


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_are_other_processes_with_one_thread_each(persistent):
    source = Pipeline(Pid(), (), None, 0)
    loader = Workers(num_workers=2, persistent_workers=persistent)
    micros = list(loader.stream(source, requests(), CPU, torch.contiguous_format))
    readers = {int(m.x[0]) for m in micros}
    assert os.getpid() not in readers
    assert len(readers) == (2 if persistent else 4)  # not persistent: new ones for each epoch
    assert {int(m.y[0]) for m in micros} == {1}
    alone = list(Loader().stream(source, requests(1), CPU, torch.contiguous_format))
    assert {int(m.x[0]) for m in alone} == {os.getpid()}


def test_asking_is_not_ahead_of_what_prefetching_needs():
    """The loader draws on the requests as it goes: an endless run must not be planned to its end first."""
    asked = []

    def endless():
        epoch = 0
        while True:
            for request in (
                Accumulate(global_batch=8, accumulation_steps=2).over(shuffled(29)).requests(0, epoch, World(), drop_last=False)
            ):
                asked.append(request)
                yield request
            epoch += 1

    stream = Workers(num_workers=2, prefetch_factor=2).stream(pipeline(), endless(), CPU, torch.contiguous_format)
    next(stream)
    assert 1 <= len(asked) <= 6
    stream.close()


class Broken(Pid):
    """A source with one file that cannot be read."""

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if 13 in indices:
            raise DataError("cat/13.jpg cannot be read as an image")
        return super().fetch(indices)


@pytest.mark.parametrize("name", ["sync", *(n for n in LOADERS if n != "resident")])
def test_a_broken_file_is_named_whoever_reads_it(name):
    loader = Loader() if name == "sync" else LOADERS[name]()
    with pytest.raises(DataError) as raised:
        list(loader.stream(Pipeline(Broken(), (), None, 0), requests(), CPU, torch.contiguous_format))
    assert raised.value.problems == ["cat/13.jpg cannot be read as an image"]


class Stuck(Pid):
    """A source whose reads last until the test is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert not self.over.wait(LIMIT_S)
        raise AssertionError


def test_a_stuck_read_is_an_error_not_a_hang(caplog):
    loader = Workers(num_workers=1, timeout_s=0.2)
    with pytest.raises(Interrupted, match=r"worker 1 of 1 .*loader\.timeout_s.* begins with sample \d+:"):
        list(loader.stream(Pipeline(Stuck(), (), None, 0), requests(), CPU, torch.contiguous_format))
    assert "where the loader's workers were:" in caplog.text
    assert re.search(r"test_loader\.py\", line \d+ in fetch", caplog.text)


def test_a_stopped_worker_is_an_error_not_a_hang(monkeypatch):
    """It holds the memory of the batches that it has announced: torch waits for that without a limit."""
    monkeypatch.setattr(workers, "GRACE_S", 0.1)
    loader, before = Workers(num_workers=1, timeout_s=0.5, prefetch_factor=8), set(multiprocessing.active_children())
    reads = multiprocessing.get_context("fork").Value("i", 0)

    class Counted(Pid):
        def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            reads.value += 1
            return super().fetch(indices)

    stream = loader.stream(Pipeline(Counted(), (), None, 0), requests(), CPU, torch.contiguous_format)
    next(stream)
    (worker,) = set(multiprocessing.active_children()) - before
    until(lambda: reads.value >= 8)  # those before the last are announced
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(Interrupted, match=r"worker 1 of 1 .*loader\.timeout_s"):
        list(stream)
    worker.join(LIMIT_S)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("loader", [Workers(num_workers=1), Workers(num_workers=1, timeout_s=0), Threads(num_threads=1)])
def test_a_run_that_is_told_to_stop_does_not_wait_for_a_stuck_read(monkeypatch, loader):
    monkeypatch.setattr(signals, "STOP_WAIT_S", 0.1)
    monkeypatch.setattr(threads, "LOOK_S", 0.1)
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", 0.1)
    source = Stuck()
    stream = loader.stream(Pipeline(source, (), None, 0), requests(), CPU, torch.contiguous_format)
    with StopFlag():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match=r"stopped by a signal while loader \w+ 1 of 1 delivered nothing"):
            list(stream)
    source.over.set()


class Slow(Pid):
    """A source that takes a while, and looks at once whether a read of the main thread's own has lasted too long."""

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.02)
        signal.raise_signal(signals.NUDGE)
        return super().fetch(indices)


ONE_AHEAD = Loader(), Threads(num_threads=1, prefetch_factor=1), Workers(num_workers=1, prefetch_factor=1)


@pytest.mark.parametrize("loader", ONE_AHEAD, ids=lambda loader: type(loader).__name__)
def test_a_run_that_is_told_to_stop_waits_anew_for_each_batch(monkeypatch, loader):
    """An update of many micro-batches lasts longer than the wait for any of them, and is finished."""
    clock, leaps = time.monotonic, []
    monkeypatch.setattr(time, "monotonic", lambda: clock() + len(leaps) * (signals.STOP_WAIT_S + workers.GRACE_S))
    monkeypatch.setattr(workers, "WATCH_S", 0.01)
    with StopFlag():
        signal.raise_signal(signal.SIGTERM)
        for micro in loader.stream(Pipeline(Slow(), (), None, 0), requests(1), CPU, torch.contiguous_format):
            leaps.append(micro)
    assert len(leaps) == 8


def test_a_stuck_thread_is_an_error_and_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", 0.1)
    released, ended = threading.Event(), []

    class Held(Pid):
        def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            released.wait(LIMIT_S)
            ended.append(indices)
            return super().fetch(indices)

    loader = Threads(num_threads=1, timeout_s=0.2)
    with pytest.raises(Interrupted, match=r"thread 1 of 1 .*loader\.timeout_s.* begins with sample \d+:"):
        list(loader.stream(Pipeline(Held(), (), None, 0), requests(), CPU, torch.contiguous_format))
    assert not ended, "it did not wait for the read"
    released.set()


@pytest.mark.parametrize("saving", ["last", "none"])
def test_a_killed_worker_ends_the_run_to_be_gone_on_with(tiny, tmp_path, monkeypatch, saving):
    fetch = Tensors.fetch

    def dying(self, indices):
        if torch.utils.data.get_worker_info() is not None:
            with (tmp_path / "reads").open("a") as reads:
                reads.write("x")
            if (tmp_path / "reads").stat().st_size > 9:
                os.kill(os.getpid(), signal.SIGKILL)
        return fetch(self, indices)

    monkeypatch.setattr(Tensors, "fetch", dying)
    words = tiny("data=digits", "loader=workers", "loader.num_workers=1", "updates=14", f"saving={saving}")
    killed = run_to_end([*words, "saving.every_updates=1"] if saving == "last" else words, ends="interrupted")
    assert "loader's worker was killed" in killed.error
    assert "loader.num_workers" in killed.error
    if saving == "none":
        assert "saving=none kept nothing" in killed.error
        return
    assert f"resume={killed.run_dir}" in killed.error
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert drivetrain.train([f"resume={killed.run_dir}"]).updates == 14


def test_a_connection_that_breaks_first_is_a_killed_worker_too():
    """The batch that is being handed over is lost before the system has said why."""

    worker = SimpleNamespace(pid=7, exitcode=-9, looks=iter([True, True, False]))
    worker.is_alive = lambda: next(worker.looks)

    class Iterator:
        _workers = (worker,)

        def __iter__(self):
            return self

        def __next__(self):
            raise ConnectionResetError("Connection reset by peer")

    with pytest.raises(Interrupted, match=r"pid 7\) ended, exit code -9"):
        list(Workers()._deliveries(Iterator(), None, None, io.BytesIO()))


def test_a_request_travels_as_numbers():
    """torch's queues hand over a tensor by a connection of its own. Where its reader is killed, a thread prints a traceback."""
    request = Request(3, torch.arange(5), 0.5, last=False, mix_with=torch.arange(5).flip(0))
    sent = bytes(ForkingPickler.dumps(request))
    assert b"multiprocessing.reductions" not in sent
    got = pickle.loads(sent)
    assert torch.equal(got.indices, request.indices)
    assert torch.equal(got.mix_with, request.mix_with)
    assert (got.epoch, got.weight, got.last, got.epoch_end) == (3, 0.5, False, False)
    assert b"multiprocessing.reductions" in bytes(ForkingPickler.dumps(request.indices)), "it is what tensors are sent as"


def test_a_killed_workers_end_is_told_where_its_batch_is_waited_for():
    """torch's signal handler would raise it anywhere. In a destructor Python prints it as a traceback, and drops it."""
    printed, hook = [], sys.unraisablehook

    class Closing:
        def __del__(self):
            signal.raise_signal(signal.SIGCHLD)

    before = set(multiprocessing.active_children())
    stream = Workers(num_workers=1, prefetch_factor=1).stream(pipeline(), requests(), CPU, torch.contiguous_format)
    next(stream)
    (worker,) = set(multiprocessing.active_children()) - before
    sys.unraisablehook = printed.append
    try:
        worker.kill()
        worker.join()
        Closing()
        with pytest.raises(Interrupted, match="a loader's worker was killed"):
            list(stream)
    finally:
        sys.unraisablehook = hook
    assert printed == []


class Decoded(Pid):
    """A source whose samples are work: who read which, and how many at a time."""

    parallel_read = True

    def __init__(self) -> None:
        self.reads: list[tuple[str, list[int]]] = []

    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.01)
        self.reads.append((threading.current_thread().name, indices.tolist()))
        return indices.view(-1, 1).to(torch.uint8), indices


def test_threads_share_a_batch_out():
    """Each batch is read in pieces by all threads, and comes out whole and in order."""
    both, mine = threading.Barrier(2, timeout=LIMIT_S), threading.local()

    class Together(Decoded):
        def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if not hasattr(mine, "begun"):  # no thread is done before the other has begun
                mine.begun = both.wait()
            return super().fetch(indices)

    source = Together()
    micros = list(Threads(num_threads=2).stream(Pipeline(source, (), None, 0), requests(1), CPU, torch.contiguous_format))
    expected = [r.indices for r in requests(1)]
    assert all(
        torch.equal(m.y, indices) and torch.equal(m.x[:, 0].long(), indices) for m, indices in zip(micros, expected, strict=True)
    )
    assert len({name for name, _ in source.reads}) == 2
    assert max(len(rows) for _, rows in source.reads) < 4
    assert sorted(i for _, rows in source.reads for i in rows) == list(range(29))


def test_a_source_in_memory_is_read_a_batch_at_a_time():
    reads = []

    class Counted(Tensors):
        def fetch(self, indices):
            reads.append(len(indices))
            return super().fetch(indices)

    source = Counted(torch.zeros(29, 1), torch.arange(29))
    list(Threads(num_threads=2).stream(Pipeline(source, (), None, 0), requests(1), CPU, torch.contiguous_format))
    assert sorted(reads) == sorted(len(r.indices) for r in requests(1))


def test_threads_read_ahead_and_no_further():
    source, asked = Decoded(), []
    wanted = (asked.append(request) or request for request in requests())
    stream = Threads(num_threads=2, prefetch_factor=2).stream(Pipeline(source, (), None, 0), wanted, CPU, torch.contiguous_format)
    next(stream)
    until(lambda: sum(len(rows) for _, rows in source.reads) >= 3 * 4)
    assert sum(len(rows) for _, rows in source.reads) == 3 * 4, "the one that is trained and two ahead"
    assert len(asked) == 3
    stream.close()


def test_device_reads_raw_bytes_and_finishes_them_in_one_piece(monkeypatch):
    """The batch that crosses to the device is as small as it lies in the source; augmentation and normalisation see it there."""
    seen = []
    original = FlipCrop.__call__
    monkeypatch.setattr(
        FlipCrop, "__call__", lambda self, x, *a: seen.append((x.dtype, threading.current_thread().name)) or original(self, x, *a)
    )
    assert len(read(DeviceLoader(num_readers=2))) == 16
    assert set(seen) == {(torch.uint8, "MainThread")}
    seen.clear()
    read(Threads(num_threads=2))
    assert all(name.startswith("loader thread") for _, name in seen), "threads augment where they read"


def test_resident_reads_every_sample_once_in_chunks_that_it_puts_behind_each_other(monkeypatch):
    monkeypatch.setattr("drivetrain.loader.device.CHUNK", 5)
    source, loader = Decoded(), Resident()
    for _ in range(2):
        micros = list(loader.stream(Pipeline(source, (), None, 0), requests(), CPU, torch.contiguous_format))
        assert [int(y) for micro in micros for y in micro.y] == [int(i) for r in requests() for i in r.indices]
        assert all(torch.equal(micro.x[:, 0].long(), micro.y) for micro in micros)
    assert sorted(i for _, rows in source.reads for i in rows) == list(range(29))


def test_resident_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr("drivetrain.loader.device.free_memory", lambda device: 40)
    with pytest.raises(UserError, match=r"loader=resident: the data takes .* loader.share=0.5 .* loader=device"):
        next(Resident().stream(Pipeline(Decoded(), (), None, 0), requests(), CPU, torch.contiguous_format))


def measured_as(monkeypatch, costs: dict[type[Loader], tuple[float, float]]) -> list[type[Loader]]:
    """Let a loader of each class take so long to start, and for each batch; return the classes as they are measured."""
    measured: list[type[Loader]] = []
    monkeypatch.setattr(
        "drivetrain.loader.auto.CostPerBatch.measure",
        lambda self, loader: measured.append(type(loader)) or Cost(*costs[type(loader)]),
    )
    return measured


def test_auto_takes_what_measures_best_and_says_why(monkeypatch):
    work, auto = pipeline(), AutoLoader(budget_s=1e-9)
    (line,) = auto.autotune(work, 8, 10**9, CPU)
    assert line.startswith("loader=auto took loader=")
    assert "of cores and waits, its start included (others, relative to it: " in line
    for costs, best in (
        ((1.0, 2.0, 3.0), Loader),
        ((3.0, 2.0, 1.0), Workers),
        ((3.0, 1.04, 1.0), Threads),  # the simpler one of two that are as good as equal
    ):
        measured_as(monkeypatch, dict(zip((Loader, Threads, Workers), ((0.0, cost) for cost in costs), strict=True)))
        auto.autotune(work, 8, 100, CPU)
        assert type(auto._chosen) is best


def test_auto_weighs_a_loaders_start_against_the_runs_length(monkeypatch):
    """Workers save 0.1 s a batch and take 10 s to start: that pays from 100 batches on."""
    work, auto = Pipeline(Decoded(), (), None, 0), AutoLoader()
    costs = {Loader: (0.0, 0.3), Threads: (1.0, 0.3), Workers: (10.0, 0.2)}
    for batches, best in ((50, Loader), (90, Loader), (150, Workers), (10_000, Workers)):
        measured_as(monkeypatch, costs)
        (line,) = auto.autotune(work, 8, batches, CPU)
        assert type(auto._chosen) is best, batches
        assert f"for {batches:,} batches of 8" in line


def test_auto_measures_no_longer_than_it_can_save(monkeypatch):
    """A run whose whole reading takes less than measuring the others is read by the loop itself."""
    work, auto = Pipeline(Decoded(), (), None, 0), AutoLoader()
    measured = measured_as(monkeypatch, {Loader: (0.0, 1e-9), Threads: (0.0, 1e-12), Workers: (0.0, 1e-12)})
    (line,) = auto.autotune(work, 8, 3, CPU)
    assert measured == [Loader]
    assert "so measuring the others would not pay" in line
    auto.autotune(work, 8, 10**12, CPU)
    assert set(measured) == {Loader, Threads, Workers}


def test_a_loaders_start_is_told_apart_from_its_batches(monkeypatch):
    clock = [0.0]

    class Slow(Loader):
        def stream(self, pipeline, requests, device, memory_format):
            clock[0] += 20
            for request in requests:
                clock[0] += 5
                yield request

    monkeypatch.setattr(CostPerBatch, "_clocks", lambda self: (clock[0],))
    cost = CostPerBatch(Pipeline(Decoded(), (), None, 0), 4, CPU).measure(Slow())
    assert cost == Cost(start=20, step=5)
    assert cost.of(100) == 520


def test_auto_goes_on_with_the_loader_whose_samples_the_run_had(monkeypatch):
    """Samples that are augmented on the device are rounded otherwise than on the CPU."""
    monkeypatch.setattr(
        AutoLoader,
        "candidates",
        lambda *_: {"loader=sync": Loader(), "loader=threads": Threads(1), "loader=device": DeviceLoader()},
    )
    monkeypatch.setattr(
        "drivetrain.loader.auto.CostPerBatch.measure", lambda self, loader: Cost(0.0, best.get(type(loader), 9.0))
    )
    work, began, later = Pipeline(Decoded(), (), None, 0), AutoLoader(), AutoLoader()
    for first, then, taken in (
        (DeviceLoader, Threads, DeviceLoader),
        (Threads, DeviceLoader, Threads),
        (Loader, Threads, Threads),
    ):
        best = {first: 1.0}
        began.autotune(work, 8, 10**9, CPU)
        best = {then: 1.0}
        later.autotune(work, 8, 10**9, CPU)
        later.load_state_dict(began.state_dict())
        assert type(later._chosen) is taken
    later.load_state_dict({})  # a checkpoint of another loader
    later.load_state_dict({"chosen": ["?"]})
    assert type(later._chosen) is Threads


def test_auto_decides_before_training(make, caplog):
    make("loader=auto", "data=digits", "loader.budget_s=1e-9").fit()
    assert any(line.startswith("loader=auto took") for line in caplog.messages)


def test_the_cores_of_a_machine_are_shared_by_its_ranks(monkeypatch):
    alone = usable_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert usable_cores() == max(1, alone // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert usable_cores() == 1


def test_a_float_source_is_not_copied():
    """as_tensor, not tensor: where nothing is to be done, nothing is copied on the way."""
    x = torch.randn(29, 4)

    class Whole(Pid):
        def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, torch.zeros(29)

    micro = next(Loader().stream(Pipeline(Whole(), (), None, 0), requests(), CPU, torch.contiguous_format))
    assert micro.x.data_ptr() == x.data_ptr()


def test_a_run_is_the_same_with_any(train):
    words = ["data=digits", "augment=[flip_crop]", "updates=3", "saving.keep=1"]
    reference, *results = (train(*words, f"loader={loader}") for loader in ("sync", "workers", "threads", "device", "resident"))
    expected = (Path(reference.run_dir) / "checkpoints/3/model.safetensors").read_bytes()
    for result in results:
        assert result.updates == 3
        assert (Path(result.run_dir) / "checkpoints/3/model.safetensors").read_bytes() == expected
        assert result.metrics == reference.metrics


def test_what_cannot_be_is_refused(problems):
    assert any("has nothing to do: data=synthetic" in p for p in problems("loader=workers"))
    words = ["loader=workers", "data=digits"]
    assert any("loader.num_workers=0" in p for p in problems(*words, "loader.num_workers=0"))
    assert any("loader.timeout_s=-1" in p for p in problems(*words, "loader.timeout_s=-1"))


def test_a_batch_is_done_with_its_last_piece():
    """Any of its pieces may be the last."""
    source = Tensors(torch.arange(4.0).view(4, 1), torch.arange(4))
    source.parallel_read = True
    pipeline = Pipeline(source, (), None, 0)
    batch = threads.SharedBatch(pipeline, Request(0, torch.arange(4), 1.0), True, 2, False)
    pieces = list(zip(batch.pieces, range(4), strict=True))
    for piece, offset in reversed(pieces):
        assert not batch.future.done()
        batch._read(piece, offset)
    assert batch.future.result()[1].tolist() == [0, 1, 2, 3]


def test_the_limit_of_a_wait_does_not_count_what_comes_after_it():
    limit = workers._WaitLimit(1.0, object(), io.BytesIO())
    assert next(limit.each(iter([1]))) == 1
    assert limit._waits_since is None


# --- every loader yields batches of dicts and tuples as the loop reads them itself, in the same order ---


@pytest.fixture(autouse=True)
def _sets(monkeypatch):
    monkeypatch.syspath_prepend(command.HERE)


def of_set(name: str, *steps) -> Pipeline:
    splits = OwnDataset(target=f"tree_sets.{name}").load(CPU)
    return Pipeline(splits.train, steps, splits.normalize, 0, images=splits.images)


def read_trees(loader: Loader, work: Pipeline):
    batch = Accumulate(global_batch=16, accumulation_steps=2)
    requests = [
        r for epoch in range(2) for r in batch.over(shuffled(len(work.source))).requests(0, epoch, World(), drop_last=False)
    ]
    return list(loader.stream(work, requests, CPU, torch.contiguous_format))


def equal(a, b) -> bool:
    return tree_structure(a) == tree_structure(b) and all(map(torch.equal, trees.leaves(a), trees.leaves(b)))


@pytest.mark.parametrize("name", ["Dicts", "Tuples", "Words", "Views"])
@pytest.mark.parametrize("loader", ["workers(1)", "threads(3)", "device, threads", "resident", "auto"])
def test_every_loader_gives_the_trees_that_the_loop_reads_itself(loader, name):
    work = {"Dicts": lambda: of_set("Dicts", FlipCrop()), "Views": views}.get(name, lambda: of_set(name))()
    expected, got = read_trees(Loader(), work), read_trees(LOADERS[loader](), work)
    assert len(expected) == len(got) == 14
    for a, b in zip(expected, got, strict=True):
        assert (a.last, a.epoch_end, float(a.weight)) == (b.last, b.epoch_end, float(b.weight))
        assert equal(a.y, b.y)
        if loader == "resident" and name == "Words":  # it holds all samples at the length of the longest
            length = a.x["ids"].shape[1]
            assert not b.x["mask"][:, length:].any()
            b.x = {key: t[:, :length] if t.ndim > 1 else t for key, t in b.x.items()}
        assert equal(a.x, b.x)


def views() -> Pipeline:
    return Pipeline(OwnDataset(target="tree_sets.Views", target_key=["start", "end"]).load(CPU).train, (), None, 0)


def test_the_images_of_a_dict_are_augmented_and_normalised_and_nothing_else():
    plain, changed = (read_trees(Loader(), of_set("Dicts", *steps))[0] for steps in ((), (FlipCrop(),)))
    assert plain.x["image"].dtype == torch.float32
    assert plain.x["image"].abs().mean() < 2
    assert not torch.equal(plain.x["image"], changed.x["image"])
    assert equal(plain.x["person"], changed.x["person"])
    assert torch.equal(plain.y, changed.y)


def test_sources_in_memory_hold_trees():
    source = Tensors({"a": torch.arange(6), "b": (torch.arange(12).view(6, 2),)}, torch.arange(6))
    x, y = source.fetch(torch.tensor([4, 1]))
    assert len(source) == 6
    assert x["a"].tolist() == y.tolist() == [4, 1]
    assert x["b"][0].tolist() == [[8, 9], [2, 3]]


class InPieces(Source):
    """Dicts that several threads read together."""

    parallel_read = True

    def __len__(self) -> int:
        return 53

    def fetch(self, indices):
        return {"a": indices.float(), "b": (indices.view(-1, 1).expand(-1, 3),)}, {"y": indices}


def test_threads_put_the_pieces_of_a_tree_together():
    work = Pipeline(InPieces(), (), None, 0)
    expected, got = read_trees(Loader(), work), read_trees(Threads(num_threads=3), work)
    assert all(equal(a.x, b.x) and equal(a.y, b.y) for a, b in zip(expected, got, strict=True))


def test_what_has_several_shapes_is_not_resident():
    class Growing(InPieces):
        parallel_read = False

        def __len__(self) -> int:
            return 300

        def fetch(self, indices):
            return {"a": torch.zeros(len(indices), int(indices.max()))}, indices

    with pytest.raises(UserError, match=r"holds samples of one shape, but these have \[255\] and \[299\]"):
        read_trees(Resident(), Pipeline(Growing(), (), None, 0))


def test_only_images_take_another_order_of_memory():
    x = {"image": torch.zeros(2, 3, 4, 4), "size": torch.zeros(2, 3)}
    moved = in_memory_format(x, torch.channels_last)
    assert moved["image"].is_contiguous(memory_format=torch.channels_last)
    assert moved["size"] is x["size"]


# --- the numbers that a user's code draws for a sample follow from seed, epoch and index; the streams stay as they were ---


KINDS = ("Nothing", "Torch", "Numpy", "Python", "Gaussian", "All", "Sometimes", "Together", "Kept", "Late", "Quiet")
WORKERS = {
    "workers(1)": lambda: Workers(num_workers=1),
    "workers(3)": lambda: Workers(num_workers=3),
    "workers(2), not persistent": lambda: Workers(num_workers=2, persistent_workers=False),
}


def source(kind: str) -> OwnSource:
    together = OwnCollate(drawing_sets.noisy, "data.collate", None) if kind == "Quiet" else Stack()
    return OwnSource(getattr(drawing_sets, kind)(), "data.target", together)


def read_drawn(
    loader: Loader, samples, seed: int = 0, epochs: int = 2, world: World | None = None, steps: int = 2
) -> torch.Tensor:
    """The samples of some epochs in their order, (n, 3): 48 of 53 in each epoch, in updates of 16."""
    batch = Accumulate(global_batch=16, accumulation_steps=steps)
    requests = (
        r for e in range(epochs) for r in batch.over(shuffled(len(samples))).requests(seed, e, world or World(), drop_last=True)
    )
    found = loader.stream(Pipeline(samples, (), None, seed), requests, CPU, torch.contiguous_format)
    return torch.cat([micro.x for micro in found])


class Beside(Source):
    """Sources whose samples stand beside each other: those that are started once read them all."""

    def __init__(self, sources: list[OwnSource]) -> None:
        self.sources, self.own_code = sources, sources[0].own_code

    def __len__(self) -> int:
        return len(self.sources[0])

    def fetch(self, *asked):
        inputs, targets = zip(*(source.fetch(*asked) for source in self.sources), strict=True)
        return torch.cat(inputs, 1), targets[0]


@pytest.mark.parametrize("kinds", [["All"], ["Quiet"], [kind for kind in KINDS if kind not in ("All", "Quiet")]], ids=",".join)
def test_samples_draw_the_same_for_any_reader_ranks_and_micro_batches(kinds):
    expected = torch.cat([read_drawn(Loader(), source(kind)) for kind in kinds], 1)

    def again(loader: Loader, **more) -> torch.Tensor:
        return read_drawn(loader, Beside([source(kind) for kind in kinds]), **more)

    assert torch.equal(again(Loader()), expected)
    for make in WORKERS.values() if len(kinds) == 1 else [WORKERS["workers(3)"]]:
        assert torch.equal(again(make()), expected)
    if kinds == ["Quiet"]:  # its batches draw, and others have other first samples
        return
    assert torch.equal(again(Loader(), steps=4), expected)
    if kinds == ["All"]:
        ranks = [again(Workers(num_workers=2), world=World(rank, 2)).split(8) for rank in range(2)]
        assert torch.equal(torch.cat([part for parts in zip(*ranks, strict=True) for part in parts]), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("Nothing", "Sometimes")])
def test_draws_differ_from_sample_to_sample_epoch_to_epoch_and_seed_to_seed(kind):
    drawn = torch.cat([read_drawn(Loader(), source(kind), seed) for seed in (0, 1)])
    apart = (drawn % 1)[:, :2].flatten()  # without the class, which is a whole number
    assert len(apart.unique()) >= 0.99 * len(apart)


class Two(drawing_sets.Base):
    def __init__(self):
        super().__init__()
        self.own = torch.Generator()

    def draw(self, index):
        return torch.rand(1).item(), torch.rand(1, generator=self.own).item(), 0.0


def test_two_generators_of_one_kind_do_not_draw_alike():
    drawn = read_drawn(Loader(), OwnSource(Two(), "data.target", Stack()))
    assert (drawn[:, 0] == drawn[:, 1]).sum() == 0


def test_samples_that_are_only_looked_at_are_the_same_in_every_run():
    first, second = (source("All").fetch(torch.arange(53))[0] for _ in range(2))
    assert torch.equal(first, second)


def test_the_key_is_the_datasets_own_number_of_a_sample():
    whole, some = source("All"), torch.tensor([40, 3, 17])
    assert torch.equal(whole.subset(some).fetch(torch.tensor([2, 0]), 1, (5, 6))[0], whole.fetch(some[[2, 0]], 1, (5, 6))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_streams_of_the_process_stay_as_they_were(kind):
    """Also where a normal number is kept for the next draw."""
    streams.seed_all(7)
    for draw in (lambda: None, np.random.randn, lambda: random.gauss(0, 1)):
        draw()
        before = streams.state()
        read_drawn(Loader(), source(kind), epochs=1)
        assert all(torch.equal(now, before[name]) for name, now in streams.state().items())


@pytest.mark.parametrize("context", [FakeTensorMode, lambda: torch.device("meta")])
def test_draws_are_apart_where_tensors_have_no_values(context):
    before = streams.state()
    with context(), streams.apart():
        torch.rand(3)
        np.random.rand()
        random.random()
    assert all(torch.equal(now, before[name]) for name, now in streams.state().items())


class Failing(drawing_sets.All):
    def draw(self, index):
        if index == 30:
            np.random.rand()
            raise ValueError("sample 30 is broken")
        return super().draw(index)


def test_a_sample_that_fails_leaves_the_streams_too():
    before = streams.state()
    with pytest.raises(ValueError, match="sample 30"):
        read_drawn(Loader(), OwnSource(Failing(), "data.target", Stack()))
    assert all(torch.equal(now, before[name]) for name, now in streams.state().items())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("Nothing", "Sometimes")])
def test_threads_and_the_resident_loader_refuse_what_draws(kind, monkeypatch):
    pipeline = Pipeline(source(kind), (), None, 0)
    for loader in (Threads(num_threads=2), DeviceLoader(num_readers=2), Resident()):
        assert "set loader=workers" in loader.refusal(pipeline)
    assert DeviceLoader(reader="workers").refusal(pipeline) is None
    monkeypatch.setattr("drivetrain.loader.auto.CostPerBatch.measure", lambda self, loader: Cost(0.0, 1.0))
    auto = AutoLoader()
    auto.autotune(pipeline, 8, 10**9, CPU)
    assert not any(isinstance(loader, Threads) for loader in auto._loaders.values())


class Rarely(drawing_sets.Base):
    def draw(self, index):
        return np.random.rand(3) if index == 40 else [0.0, 0.0, 0.0]


def test_a_rare_draw_among_threads_ends_the_run():
    rare = OwnSource(Rarely(), "data.target", Stack())
    assert Threads(num_threads=2).refusal(Pipeline(rare, (), None, 0)) is None  # none of the first samples draws
    with pytest.raises(UserError, match=r"the samples draw from numpy, .*set loader=workers"):
        read_drawn(Threads(num_threads=2), rare, epochs=3)


def test_what_others_draw_beside_the_threads_is_no_reason():
    quiet = source("Nothing")
    batch = Accumulate(global_batch=16, accumulation_steps=2)
    requests = batch.over(shuffled(53)).requests(0, 0, World(), drop_last=True)
    found = []
    for micro in Threads(num_threads=1).stream(Pipeline(quiet, (), None, 0), requests, CPU, torch.contiguous_format):
        np.random.rand()  # as a callback may
        quiet.reader._suspected = True
        found.append(micro.x)
    assert torch.equal(torch.cat(found), read_drawn(Loader(), source("Nothing"), epochs=1))


def test_a_generator_without_a_seed_is_said(monkeypatch, caplog):
    monkeypatch.syspath_prepend(Path(drawing_sets.__file__).parent)
    OwnDataset(target="drawing_sets.All").load(CPU)
    assert not caplog.records
    OwnDataset(target="drawing_sets.Entropy").load(CPU)
    assert "is another one at each read" in caplog.text


# --- the samples of an update, and their pixels, depend on the seed, the epoch and the sample alone ---
#
# Not on the loader, how many readers it has, how many ranks there are, or where the run went on.


FILES, EPOCHS = 23, 2
READERS = {
    "sync": Loader,
    "workers(1)": lambda: Workers(num_workers=1),
    "workers(2)": lambda: Workers(num_workers=2, prefetch_factor=1),
    "threads(1)": lambda: Threads(num_threads=1),
    "threads(3)": lambda: Threads(num_threads=3),
    "device": lambda: DeviceLoader(num_readers=2),
    "auto": AutoLoader,
}
BATCHES = {"fixed": lambda: Batch(global_batch=6), "accumulate": lambda: Accumulate(global_batch=6, accumulation_steps=3)}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Files whose label is their number."""
    folder, noise = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    files = [(folder / f"{n}.{'jpg' if n % 2 else 'png'}", n) for n in range(FILES)]
    for path, n in files:
        Image.fromarray(noise.integers(0, 255, (20 + n, 30, 3), dtype=np.uint8)).save(path)
    steps = (RandomResizedCrop(), FlipCrop(pad=2), RandomErasing())
    return Pipeline(images_of(files, 16, 10**6), steps, Normalize([120.0] * 3, [60.0] * 3), 5, FILES)


def updates(loader, batch, work, ranks=1, skip=0, first=0):
    """Each update as what its samples look like, by number, whichever rank had them."""
    found = [defaultdict(list) for _ in range(EPOCHS * 4)]
    for rank in range(ranks):
        requests = (
            request
            for epoch in range(first, EPOCHS)
            for request in batch.over(shuffled(len(work.source))).requests(
                5, epoch, World(rank, ranks), False, skip=skip if epoch == first else 0
            )
        )
        at = 4 * first + skip
        for micro in loader.stream(work, requests, CPU, torch.contiguous_format):
            for x, y in zip(micro.x, micro.y.tolist(), strict=True):
                if float(micro.weight):
                    found[at][y].append(x)
            at += micro.last
    return found


def same(a, b):
    """True if updates have the same samples, each once, with the same pixels."""
    return [sorted(u) for u in a] == [sorted(u) for u in b] and all(
        len(u[n]) == len(v[n]) == 1 and torch.equal(u[n][0], v[n][0]) for u, v in zip(a, b, strict=True) for n in u
    )


@pytest.fixture(scope="module")
def reference(pictures):
    """The updates as the loop itself reads them."""
    found = updates(Loader(), Batch(global_batch=6), pictures)
    assert [len(u) for u in found] == [6, 6, 6, 5] * EPOCHS
    for epoch in range(EPOCHS):
        assert sorted(n for u in found[4 * epoch : 4 * epoch + 4] for n in u) == list(range(FILES)), "each once"
    assert not torch.equal(found[0][n := next(iter(found[0]))][0], next(u[n][0] for u in found[4:] if n in u))
    return found


@pytest.mark.parametrize("batch", [pytest.param("fixed", marks=pytest.mark.slow), "accumulate"])
@pytest.mark.parametrize("loader", READERS)
def test_loaders_ranks_and_resuming_change_nothing(pictures, reference, loader, batch):
    assert same(updates(READERS[loader](), BATCHES[batch](), pictures, ranks=2), reference)
    gone_on = updates(READERS[loader](), BATCHES[batch](), pictures, ranks=1, skip=3, first=1)
    assert same(gone_on[7:], reference[7:])
    assert not any(gone_on[:7]), "nothing before is read again"


def test_the_set_on_the_device_is_sampled_alike(pictures, reference):
    """loader=resident cuts what has been decoded at its size: its own reference, for any ranks and wherever it goes on."""
    its_own = updates(Resident(), Batch(global_batch=6), pictures)
    assert same(updates(Resident(), Accumulate(global_batch=6, accumulation_steps=2), pictures, 2), its_own)
    assert same(updates(Resident(), Batch(global_batch=6), pictures, 1, skip=2, first=1)[6:], its_own[6:])
    assert [sorted(u) for u in its_own] == [sorted(u) for u in reference], "the same samples"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("loader", ["sync", pytest.param("workers(2)", marks=pytest.mark.slow), "threads(3)"])
def test_sequences_in_buckets_too(loader, ranks):
    noise = np.random.default_rng(0)
    source = Texts([noise.integers(1, 255, 5 + 3 * n, dtype=np.uint8).tobytes() for n in range(FILES)], 24)
    batch = Bucketed(global_batch=6, pad_to=4).over(shuffled(len(source)))
    batch.measure(source, 5, World())
    work = Pipeline(source, (), None, 5)

    def taken(loader, ranks, skip=0):
        found = []
        for rank in range(ranks):
            requests = batch.over(shuffled(len(source))).requests(5, 1, World(rank, ranks), False, skip=skip)
            for at, micro in enumerate(loader.stream(work, requests, CPU, torch.contiguous_format)):
                found += [(at + skip, tuple(x[y >= 0].tolist())) for x, y in zip(micro.x, micro.y, strict=True)]
        return sorted(found)

    reference = taken(Loader(), 1)
    assert len(reference) == len(source)
    assert taken(READERS[loader](), ranks) == reference
    assert taken(READERS[loader](), ranks, skip=2) == [f for f in reference if f[0] >= 2]


# --- the end of a worker ---


@pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="there is no telling who sent a signal")
def test_a_worker_ends_with_the_run_and_not_before() -> None:
    """SIGTERM to all processes, as Slurm and systemd send it: the run needs its next batch to finish its update."""
    source = Tensors(torch.arange(12.0).reshape(12, 1, 1, 1), torch.zeros(12, dtype=torch.int64))
    requests = [Request(0, torch.tensor([number]), 1.0) for number in range(12)]
    before = set(multiprocessing.active_children())
    stream = Workers(num_workers=1, prefetch_factor=1).stream(
        Pipeline(source, (), None, 0), requests, torch.device("cpu"), torch.contiguous_format
    )
    next(stream)
    (worker,) = set(multiprocessing.active_children()) - before
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    assert sum(1 for _ in stream) == 11
    worker.join(LIMIT_S)
    assert worker.exitcode == 0

    with workers._sigterm_blocked():
        child = multiprocessing.get_context("fork").Process(
            target=lambda: (workers._begin_worker(sys.__stderr__, 0), time.sleep(LIMIT_S))
        )
        child.start()
    subprocess.run(["kill", "-TERM", str(child.pid)], check=True)
    child.join(0.3)
    assert child.is_alive()
    child.terminate()
    child.join(LIMIT_S)
    assert child.exitcode == 0


def test_a_worker_of_a_killed_run_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(workers, "end_with_run", lambda run: None)
    threads = torch.get_num_threads()
    with tempfile.TemporaryFile() as stacks:
        workers._begin_worker(stacks, 0)
        faulthandler.unregister(workers.STACK_SIGNAL)
    torch.set_num_threads(threads)
    sys.excepthook(EOFError, EOFError(), None)
    sys.excepthook(ConnectionResetError, ConnectionResetError(), None)
    assert capsys.readouterr().err == ""
    sys.excepthook(ValueError, ValueError("an error of the reader's own"), None)
    assert "an error of the reader's own" in capsys.readouterr().err


def test_a_workers_death_is_known_wherever_it_is_raised(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's signal handler raises it in the main thread, whatever that does: here in an evaluation."""

    def dies(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    monkeypatch.setattr(Evaluator, "evaluate", dies)
    loading = ("loader=workers", "loader.num_workers=1")
    ended = train("data=digits", *loading, "updates=2", "epochs=2", "saving.every_updates=1", ends="interrupted")
    assert "a loader's worker was killed" in ended.error
    assert f"resume={ended.run_dir}" in ended.error
