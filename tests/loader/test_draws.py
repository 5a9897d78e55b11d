"""The numbers that a user's code draws for a sample follow from seed, epoch and index; the streams stay as they were."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from drivetrain.batch.base import Accumulate
from drivetrain.core import streams
from drivetrain.core.errors import UserError
from drivetrain.core.order import shuffled
from drivetrain.core.source import Source
from drivetrain.core.world import World
from drivetrain.data.own import Own, OwnCollate, OwnSource, Stack
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.auto import Auto, Cost
from drivetrain.loader.device import Device, Resident
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from tests.support import drawing_sets

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores: on purpose
CPU = torch.device("cpu")
KINDS = ("Nothing", "Torch", "Numpy", "Python", "Gaussian", "All", "Sometimes", "Together", "Kept", "Late", "Quiet")
WORKERS = {
    "workers(1)": lambda: Workers(num_workers=1),
    "workers(3)": lambda: Workers(num_workers=3),
    "workers(2), not persistent": lambda: Workers(num_workers=2, persistent_workers=False),
}


def source(kind: str) -> OwnSource:
    together = OwnCollate(drawing_sets.noisy, "data.collate", None) if kind == "Quiet" else Stack()
    return OwnSource(getattr(drawing_sets, kind)(), "data.target", together)


def read(loader: Loader, samples, seed: int = 0, epochs: int = 2, world: World | None = None, steps: int = 2) -> torch.Tensor:
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
    expected = torch.cat([read(Loader(), source(kind)) for kind in kinds], 1)

    def again(loader: Loader, **more) -> torch.Tensor:
        return read(loader, Beside([source(kind) for kind in kinds]), **more)

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
    drawn = torch.cat([read(Loader(), source(kind), seed) for seed in (0, 1)])
    apart = (drawn % 1)[:, :2].flatten()  # without the class, which is a whole number
    assert len(apart.unique()) >= 0.99 * len(apart)


class Two(drawing_sets.Base):
    def __init__(self):
        super().__init__()
        self.own = torch.Generator()

    def draw(self, index):
        return torch.rand(1).item(), torch.rand(1, generator=self.own).item(), 0.0


def test_two_generators_of_one_kind_do_not_draw_alike():
    drawn = read(Loader(), OwnSource(Two(), "data.target", Stack()))
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
        read(Loader(), source(kind), epochs=1)
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
        read(Loader(), OwnSource(Failing(), "data.target", Stack()))
    assert all(torch.equal(now, before[name]) for name, now in streams.state().items())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("Nothing", "Sometimes")])
def test_threads_and_the_resident_loader_refuse_what_draws(kind, monkeypatch):
    pipeline = Pipeline(source(kind), (), None, 0)
    for loader in (Threads(num_threads=2), Device(num_readers=2), Resident()):
        assert "set loader=workers" in loader.refusal(pipeline)
    assert Device(reader="workers").refusal(pipeline) is None
    monkeypatch.setattr("drivetrain.loader.auto.CostPerBatch.measure", lambda self, loader: Cost(0.0, 1.0))
    auto = Auto()
    auto.autotune(pipeline, 8, 10**9, CPU)
    assert not any(isinstance(loader, Threads) for loader in auto._loaders.values())


class Rarely(drawing_sets.Base):
    def draw(self, index):
        return np.random.rand(3) if index == 40 else [0.0, 0.0, 0.0]


def test_a_rare_draw_among_threads_ends_the_run():
    rare = OwnSource(Rarely(), "data.target", Stack())
    assert Threads(num_threads=2).refusal(Pipeline(rare, (), None, 0)) is None  # none of the first samples draws
    with pytest.raises(UserError, match=r"the samples draw from numpy, .*set loader=workers"):
        read(Threads(num_threads=2), rare, epochs=3)


def test_what_others_draw_beside_the_threads_is_no_reason():
    quiet = source("Nothing")
    batch = Accumulate(global_batch=16, accumulation_steps=2)
    requests = batch.over(shuffled(53)).requests(0, 0, World(), drop_last=True)
    found = []
    for micro in Threads(num_threads=1).stream(Pipeline(quiet, (), None, 0), requests, CPU, torch.contiguous_format):
        np.random.rand()  # as a callback may
        quiet.reader._suspected = True
        found.append(micro.x)
    assert torch.equal(torch.cat(found), read(Loader(), source("Nothing"), epochs=1))


def test_a_generator_without_a_seed_is_said(monkeypatch, caplog):
    monkeypatch.syspath_prepend(Path(drawing_sets.__file__).parent)
    Own(target="drawing_sets.All").load(CPU)
    assert not caplog.records
    Own(target="drawing_sets.Entropy").load(CPU)
    assert "is another one at each read" in caplog.text
