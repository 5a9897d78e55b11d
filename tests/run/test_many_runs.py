"""What a process holds stays the same, however many runs, updates and evaluations it makes: descriptors, threads and memory."""

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support import slow

WAYS = {
    "plain": [],
    "threads": ["data=digits", "loader=threads", "loader.num_threads=2"],
    "workers": ["data=digits", "loader=workers", "loader.num_workers=1"],
    "best, averaged": ["saving=best", "ema=ema", "metrics=[f1]"],
    "asynchronous": ["saving=best", "saving.asynchronous=true"],  # within a run it holds what is being written
    "all loggers": ["logger=[files,csv,tensorboard]", "runtime.threads=2"],
}
MIB = 2**20


class Held(NamedTuple):
    """What this process holds."""

    descriptors: int
    threads: int
    children: int
    tensors: int
    folders: int  # of multiprocessing


@pytest.fixture(autouse=True)
def younger() -> Iterator[None]:
    """Leave out what was there before the test: the collector then looks at little, in a process of many tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held() -> Held:
    gc.collect()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    children = len(multiprocessing.active_children())
    temporary = multiprocessing.current_process()._config.get("tempdir")
    return Held(len(os.listdir("/proc/self/fd")), threading.active_count(), children, tensors, int(temporary is not None))


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / MIB


@pytest.mark.parametrize(
    ("way", "runs"), slow.but(lambda case: case[1] < 10, [*((way, 3) for way in WAYS), *((way, 300) for way in WAYS)])
)
def test_runs_leave_nothing_in_their_process(train, way, runs):
    words = [*WAYS[way], "updates=2", "log_every=1"]
    for _ in range(2):  # what is made once
        assert train(*words).status == "completed"
    before, memory = held(), 0.0
    for number in range(runs):
        assert train(*words).status == "completed"
        if not number % 20:  # what only waits for the collector of garbage would grow until it comes
            gc.collect()
        memory = resident_mib() if number == runs // 3 else memory
    assert held() == before
    if runs > 100:  # after the first third
        assert resident_mib() - memory < 32


@pytest.mark.parametrize(("updates", "epochs"), slow.but(lambda case: case[0] < 100, [(40, 5), (2_000, 2), (200, 200)]))
@pytest.mark.parametrize("way", ["plain", "best, averaged", "all loggers"])
def test_updates_and_evaluations_leave_nothing_in_their_run(make, monkeypatch, way, updates, epochs):
    """Looked at after each record and each evaluation."""
    samples = -(-updates // epochs) * 8
    trainer = make(*WAYS[way], f"epochs={epochs}", "updates=null", f"data.samples={samples}", "batch.global_batch=8")
    seen: list[Held] = []
    record = trainer.record
    monkeypatch.setattr(trainer, "record", lambda: (record(), seen.append(held())))
    trainer.fit()
    assert trainer.progress.updates == updates
    half = len(seen) // 2
    assert half > 9
    for first, second in zip(zip(*seen[:half], strict=True), zip(*seen[half:], strict=True), strict=True):
        assert max(second) <= max(first)
