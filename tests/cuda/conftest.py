"""Runs on a fake device, built and trained in this process."""

import functools

import pytest

from drivetrain.config import validate as check
from drivetrain.core.errors import UserError
from drivetrain.core.world import World
from drivetrain.engine import build, flops
from drivetrain.engine.context import RunContext
from drivetrain.launch import launcher
from drivetrain.loader.base import side_stream
from drivetrain.saving import checkpoint_io
from tests.conftest import Sink
from tests.support import fake_device


@functools.lru_cache(maxsize=4)  # composing takes longer than training
def composed(words):
    try:
        return launcher.prepare(list(words))
    except UserError as refused:
        return refused


def prepared(words):
    """The job of a run with these words. Raises UserError."""
    job = composed(words)
    if isinstance(job, UserError):
        raise job
    return job


@pytest.fixture
def pretend(monkeypatch):
    """`pretend(kind)`: the fake device of this kind, which torch and drivetrain take for this machine's accelerator."""

    def device(kind):
        fake_device.pretend(monkeypatch, kind)
        side_stream.cache_clear()
        return fake_device.FakeDevice(kind)

    yield device
    side_stream.cache_clear()  # the next test is to have a stream of its own device


@pytest.fixture
def fake_run(tiny, data_folder, monkeypatch, tmp_path, pretend):
    """`fake_run(kind, *words)`: the trainer of a tiny run that has made two updates on a fake device, and the device.

    What makes the host wait is found in the second update: the first makes the optimizer's state.
    """
    contexts = []

    def trained(kind, *words, world=None):
        monkeypatch.chdir(data_folder)
        monkeypatch.syspath_prepend(data_folder)
        for name in ("save", "save_sharded"):  # files hold real tensors
            monkeypatch.setattr(checkpoint_io, name, lambda *_, **__: None)
        monkeypatch.setattr(flops, "count", lambda *_: flops.ModelFlops(None, "not of interest here"))
        device = pretend(kind)
        job = prepared(tuple(tiny(*words, "updates=2")))
        check.validate_device(job.run)
        (tmp_path / "run").mkdir(exist_ok=True)
        context = RunContext(job.run, world or World(), tmp_path / "run")
        contexts.append(context)
        with device:
            trainer = build.build(context, [Sink()])
            trainer.evaluator.max_batches = 1
            trainer.stream_watchers.append(fake_device.watch_steps(device, 1))
            trainer.fit()
        return trainer, device

    yield trained
    for context in reversed(contexts):
        context.on_exit.close()
