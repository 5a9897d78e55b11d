"""Saving beside the training: on a simulated device, which works through a queue of its own, and on the CPU."""

import contextlib
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from drivetrain.core.horizon import Progress
from drivetrain.parallel import Parallel
from drivetrain.saving.options import Last
from drivetrain.saving.writer import HostCopy, Writer


class Queue:
    """The work that the simulated device has not done yet."""

    def __init__(self) -> None:
        self.work = []

    def run(self, count: int) -> None:
        for job in self.work[:count]:
            job()
        del self.work[:count]


class Event:
    """torch.Event of the simulated device."""

    queue: Queue

    def __init__(self, device) -> None:
        assert device.type == "cuda"

    def record(self) -> None:
        self.behind = len(self.queue.work)

    def synchronize(self) -> None:
        self.queue.run(self.behind)


class OnDevice(torch.Tensor):
    """A tensor that says it is on CUDA; copies of it are written when the queue is run."""

    @staticmethod
    def __new__(cls, values, queue):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device="cuda")

    def __init__(self, values, queue) -> None:
        self.values, self.queue = values, queue

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (given, *_), kwargs = args, kwargs or {}
        if func is torch.ops.aten.detach.default:
            return OnDevice(given.values, given.queue)
        assert func is torch.ops.aten._to_copy.default, func
        copy = torch.full_like(given.values, torch.nan)
        given.queue.work.append(lambda: copy.copy_(given.values))
        if not kwargs.get("non_blocking"):
            given.queue.run(len(given.queue.work))
        return copy


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(Event, "queue", queue, raising=False)
    monkeypatch.setattr(torch, "Event", Event)
    return queue


def test_a_copy_is_of_its_moment_and_the_loop_does_not_wait(queue):
    values = torch.arange(3.0)
    copy = HostCopy({"weights": [OnDevice(values, queue)], "step": 7})
    queue.work.append(lambda: values.add_(1))  # the next update
    assert len(queue.work) == 2, "nothing waited for the device"
    taken = copy.wait()
    assert taken["step"] == 7
    assert torch.equal(taken["weights"][0], torch.arange(3.0))
    assert len(queue.work) == 1, "the update is not waited for"


def test_a_copy_from_the_cpu_is_of_its_moment():
    weights = torch.arange(3.0)
    copy = HostCopy([weights])
    weights.add_(1)
    assert torch.equal(copy.wait()[0], torch.arange(3.0))


def stub(weights, progress):
    state = {"optimizer": {"state": {}, "param_groups": []}, "ema": {}}
    return SimpleNamespace(model=SimpleNamespace(state_dict=lambda: {"w": weights}), state=lambda: state, progress=progress)


def test_the_thread_writes_the_weights_of_the_save(queue, tmp_path):
    values, progress = torch.arange(3.0), Progress()
    writer = Writer(tmp_path, Last(asynchronous=True), Parallel(), contextlib.nullcontext)
    for update in (1, 2):
        progress.updates = update
        writer.save(stub(OnDevice(values, queue), progress))
        queue.work.append(lambda: values.add_(1))
    writer.wait()
    saved = [safetensors.torch.load_file(tmp_path / f"checkpoints/{n}/model.safetensors")["w"] for n in (1, 2)]
    assert torch.equal(saved[0], torch.arange(3.0))
    assert torch.equal(saved[1], torch.arange(3.0) + 1)


def test_only_the_rank_that_writes_copies(tmp_path, monkeypatch):
    monkeypatch.setattr("drivetrain.saving.writer.HostCopy", lambda values: pytest.fail("rank 1 copied what rank 0 writes"))
    parallel = Parallel()
    parallel.world = SimpleNamespace(rank=1, size=2)
    Writer(tmp_path, Last(asynchronous=True), parallel, contextlib.nullcontext).save(stub(torch.zeros(2), Progress()))


def test_ranks_that_share_the_writing_share_their_buffers_before(tmp_path, monkeypatch):
    """Each rank's BatchNorm has statistics of its own, and any rank may write any of them."""
    calls = []
    parallel = Parallel()
    monkeypatch.setattr(parallel, "broadcast_buffers", calls.append, raising=False)
    monkeypatch.setattr("drivetrain.saving.checkpoint_io.save_sharded", lambda *_: calls.append("written"))
    trainer = stub(torch.zeros(2), Progress())
    Writer(tmp_path, Last(sharded=True), parallel, contextlib.nullcontext).save(trainer)
    assert calls == [trainer.model, "written"]
