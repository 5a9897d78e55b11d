"""Every loader yields the same micro-batches in the same order, wherever they are read."""

import os
from pathlib import Path

import pytest
import torch

from drivetrain.augment import FlipCrop
from drivetrain.batch import Accumulate
from drivetrain.data import Normalize, Tensors
from drivetrain.errors import DataError, UserError
from drivetrain.loader import Loader, Pipeline, Workers
from drivetrain.plan import Micro, World

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores: on purpose
CPU = torch.device("cpu")
LOADERS = {
    "workers(1)": lambda: Workers(num_workers=1),
    "workers(3)": lambda: Workers(num_workers=3, prefetch_factor=3),
    "workers(2), not persistent": lambda: Workers(num_workers=2, persistent_workers=False),
}


def pipeline() -> Pipeline:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(255, (29, 3, 8, 8), dtype=torch.uint8, generator=generator)
    source = Tensors(images, torch.arange(29))
    return Pipeline(source, (FlipCrop(),), Normalize([100.0] * 3, [50.0] * 3), 0)


def requests(epochs: int = 2):
    """Two epochs of 29 samples in updates of 8 and micro-batches of 4, the tail included."""
    batch = Accumulate(global_batch=8, steps=2)
    for epoch in range(epochs):
        yield from batch.requests(29, 0, epoch, World(), drop_last=False)


def read(loader: Loader, wanted=None) -> list[Micro]:
    return list(loader.stream(pipeline(), requests() if wanted is None else wanted, CPU, torch.contiguous_format))


@pytest.mark.parametrize("name", LOADERS)
def test_workers_give_what_the_loop_reads_itself(name):
    expected, got = read(Loader()), read(LOADERS[name]())
    assert len(expected) == len(got) == 16
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert (a.last, a.epoch_end, float(a.weight)) == (b.last, b.epoch_end, float(b.weight))
    assert sum(m.epoch_end for m in got) == 2
    epochs = [torch.cat([m.y for m in got[:8]]), torch.cat([m.y for m in got[8:]])]
    assert all(sorted(epoch.tolist()) == list(range(29)) for epoch in epochs)
    assert not torch.equal(*epochs)  # workers that persist have learnt of the new epoch


class Pid:
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


def test_reading_does_not_touch_the_models_random_stream():
    for loader in (Loader(), Workers(num_workers=1)):
        before = torch.get_rng_state()
        assert len(read(loader)) == 16
        assert torch.equal(torch.get_rng_state(), before)


def test_asking_is_not_ahead_of_what_prefetching_needs():
    """The loader draws on the requests as it goes: an endless run must not be planned to its end first."""
    asked = []

    def endless():
        epoch = 0
        while True:
            for request in Accumulate(global_batch=8, steps=2).requests(29, 0, epoch, World(), drop_last=False):
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


@pytest.mark.parametrize("name", ["sync", *LOADERS])
def test_a_broken_file_is_named_whoever_reads_it(name):
    loader = Loader() if name == "sync" else LOADERS[name]()
    with pytest.raises(DataError) as raised:
        list(loader.stream(Pipeline(Broken(), (), None, 0), requests(), CPU, torch.contiguous_format))
    assert raised.value.problems == ["cat/13.jpg cannot be read as an image"]


class Stuck(Pid):
    def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import time

        time.sleep(3)
        raise AssertionError


def test_a_stuck_read_is_an_error_not_a_hang():
    loader = Workers(num_workers=1, timeout_s=0.2)
    with pytest.raises(UserError, match=r"loader\.timeout_s"):
        list(loader.stream(Pipeline(Stuck(), (), None, 0), requests(), CPU, torch.contiguous_format))


def test_images_come_in_the_wanted_memory_format():
    micro = next(Loader().stream(pipeline(), requests(), CPU, torch.channels_last))
    assert micro.x.is_contiguous(memory_format=torch.channels_last)
    assert not micro.x.is_contiguous()


def test_a_float_source_is_not_copied():
    """as_tensor, not tensor: where nothing is to be done, nothing is copied on the way."""
    x = torch.randn(29, 4)

    class Whole(Pid):
        def fetch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, torch.zeros(29)

    micro = next(Loader().stream(Pipeline(Whole(), (), None, 0), requests(), CPU, torch.contiguous_format))
    assert micro.x.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("loader", ["sync", "workers"])
def test_a_run_is_the_same_with_either(train, loader):
    import safetensors.torch

    words = ["data=digits", "augment=[flip_crop]", "updates=3", "saving.keep=1"]
    result = train(*words, f"loader={loader}")
    reference = train(*words)
    weights = [safetensors.torch.load_file(Path(r.run_dir) / "checkpoints/3/model.safetensors") for r in (result, reference)]
    assert result.updates == reference.updates == 3
    assert all(torch.equal(t, weights[1][name]) for name, t in weights[0].items())
    assert result.metrics == reference.metrics


def test_what_cannot_be_is_refused(problems):
    assert any("has nothing to do for data=synthetic" in p for p in problems("loader=workers"))
    words = ["loader=workers", "data=digits"]
    assert any("loader.num_workers=0" in p for p in problems(*words, "loader.num_workers=0"))
    assert any("loader.timeout_s=-1" in p for p in problems(*words, "loader.timeout_s=-1"))
