"""The samples of an update, and their pixels, depend on the seed, the epoch and the sample alone.

Not on the loader, how many readers it has, how many ranks there are, or where the run went on.
"""

from collections import defaultdict

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.augment.erasing import RandomErasing
from drivetrain.augment.geometry import FlipCrop, RandomResizedCrop
from drivetrain.batch import Batch
from drivetrain.batch.base import Accumulate
from drivetrain.batch.bucketed import Bucketed
from drivetrain.core.order import shuffled
from drivetrain.core.world import World
from drivetrain.data import Normalize
from drivetrain.data.text import Texts
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.auto import Auto
from drivetrain.loader.device import Device, Resident
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from tests.support.sets import images_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores: on purpose
CPU, FILES, EPOCHS = torch.device("cpu"), 23, 2
LOADERS = {
    "sync": Loader,
    "workers(1)": lambda: Workers(num_workers=1),
    "workers(2)": lambda: Workers(num_workers=2, prefetch_factor=1),
    "threads(1)": lambda: Threads(num_threads=1),
    "threads(3)": lambda: Threads(num_threads=3),
    "device": lambda: Device(num_readers=2),
    "auto": Auto,
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


def updates(loader, batch, pipeline, ranks=1, skip=0, first=0):
    """Each update as what its samples look like, by number, whichever rank had them."""
    found = [defaultdict(list) for _ in range(EPOCHS * 4)]
    for rank in range(ranks):
        requests = (
            request
            for epoch in range(first, EPOCHS)
            for request in batch.over(shuffled(len(pipeline.source))).requests(
                5, epoch, World(rank, ranks), False, skip=skip if epoch == first else 0
            )
        )
        at = 4 * first + skip
        for micro in loader.stream(pipeline, requests, CPU, torch.contiguous_format):
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
@pytest.mark.parametrize("loader", LOADERS)
def test_loaders_ranks_and_resuming_change_nothing(pictures, reference, loader, batch):
    assert same(updates(LOADERS[loader](), BATCHES[batch](), pictures, ranks=2), reference)
    gone_on = updates(LOADERS[loader](), BATCHES[batch](), pictures, ranks=1, skip=3, first=1)
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
    pipeline = Pipeline(source, (), None, 5)

    def taken(loader, ranks, skip=0):
        found = []
        for rank in range(ranks):
            requests = batch.over(shuffled(len(source))).requests(5, 1, World(rank, ranks), False, skip=skip)
            for at, micro in enumerate(loader.stream(pipeline, requests, CPU, torch.contiguous_format)):
                found += [(at + skip, tuple(x[y >= 0].tolist())) for x, y in zip(micro.x, micro.y, strict=True)]
        return sorted(found)

    reference = taken(Loader(), 1)
    assert len(reference) == len(source)
    assert taken(LOADERS[loader](), ranks) == reference
    assert taken(LOADERS[loader](), ranks, skip=2) == [f for f in reference if f[0] >= 2]
