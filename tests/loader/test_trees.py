"""Every loader yields batches of dicts and tuples as the loop reads them itself, in the same order."""

import pytest
import torch
from torch.utils._pytree import tree_structure

from drivetrain.augment.geometry import FlipCrop
from drivetrain.batch.base import Accumulate
from drivetrain.core import trees
from drivetrain.core.errors import UserError
from drivetrain.core.order import shuffled
from drivetrain.core.source import Source
from drivetrain.core.world import World
from drivetrain.data import Tensors
from drivetrain.data.own import Own
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.base import in_memory_format
from drivetrain.loader.device import Resident
from drivetrain.loader.threads import Threads
from tests.data.test_packed import CPU
from tests.loader.test_loader import LOADERS
from tests.support import command

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more workers than cores: on purpose


@pytest.fixture(autouse=True)
def _sets(monkeypatch):
    monkeypatch.syspath_prepend(command.HERE)


def pipeline(name: str, *steps) -> Pipeline:
    splits = Own(target=f"tree_sets.{name}").load(CPU)
    return Pipeline(splits.train, steps, splits.normalize, 0, images=splits.images)


def read(loader: Loader, work: Pipeline):
    batch = Accumulate(global_batch=16, accumulation_steps=2)
    requests = [
        r for epoch in range(2) for r in batch.over(shuffled(len(work.source))).requests(0, epoch, World(), drop_last=False)
    ]
    return list(loader.stream(work, requests, CPU, torch.contiguous_format))


def equal(a, b) -> bool:
    return tree_structure(a) == tree_structure(b) and all(map(torch.equal, trees.leaves(a), trees.leaves(b)))


@pytest.mark.parametrize("name", ["Dicts", "Tuples", "Words", "Views"])
@pytest.mark.parametrize("loader", ["workers(1)", "threads(3)", "device, threads", "resident", "auto"])
def test_every_loader_gives_what_the_loop_reads_itself(loader, name):
    work = {"Dicts": lambda: pipeline("Dicts", FlipCrop()), "Views": views}.get(name, lambda: pipeline(name))()
    expected, got = read(Loader(), work), read(LOADERS[loader](), work)
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
    return Pipeline(Own(target="tree_sets.Views", target_key=["start", "end"]).load(CPU).train, (), None, 0)


def test_the_images_of_a_dict_are_augmented_and_normalised_and_nothing_else():
    plain, changed = (read(Loader(), pipeline("Dicts", *steps))[0] for steps in ((), (FlipCrop(),)))
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
    expected, got = read(Loader(), work), read(Threads(num_threads=3), work)
    assert all(equal(a.x, b.x) and equal(a.y, b.y) for a, b in zip(expected, got, strict=True))


def test_what_has_several_shapes_is_not_resident():
    class Growing(InPieces):
        parallel_read = False

        def __len__(self) -> int:
            return 300

        def fetch(self, indices):
            return {"a": torch.zeros(len(indices), int(indices.max()))}, indices

    with pytest.raises(UserError, match=r"holds samples of one shape, and these have \[255\] and \[299\]"):
        read(Resident(), Pipeline(Growing(), (), None, 0))


def test_only_images_take_another_order_of_memory():
    x = {"image": torch.zeros(2, 3, 4, 4), "size": torch.zeros(2, 3)}
    moved = in_memory_format(x, torch.channels_last)
    assert moved["image"].is_contiguous(memory_format=torch.channels_last)
    assert moved["size"] is x["size"]
