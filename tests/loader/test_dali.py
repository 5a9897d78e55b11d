"""loader=dali: the same samples in the same order as every other loader, pixels within a level or two."""

import itertools

import pytest
import torch
from PIL import Image

from drivetrain.augment.geometry import FlipCrop, RandomResizedCrop
from drivetrain.batch import Batch
from drivetrain.core.errors import DataError
from drivetrain.core.order import shuffled
from drivetrain.core.step.microbatch import Request
from drivetrain.core.world import World
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.dali import Dali
from tests.support import later
from tests.support.sets import images_of
from tests.support.to_end import run_to_end

later.package("nvidia.dali")
CPU = torch.device("cpu")


def smooth(path, width, height, label, **how):
    """A picture whose pixels tell where they are."""
    import numpy as np

    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * x / width, 255 * y / height, np.full_like(x, 60 * label)], 2).astype(np.uint8)
    Image.fromarray(pixels).save(path, **how)


@pytest.fixture
def files(tmp_path):
    named = []
    for n in range(20):
        path = tmp_path / f"{n:02d}.jpg"
        smooth(path, 90 + 7 * n, 120 - 2 * n, n % 3, quality=95)
        named.append((path, n % 3))
    return named


def batches(loader, source, steps=(), epochs=2, size=6, drop_last=False):
    pipeline = Pipeline(source, steps, None, 3, 3)
    plan = Batch(global_batch=size)
    requests = itertools.chain(*(plan.over(shuffled(len(source))).requests(3, e, World(), drop_last) for e in range(epochs)))
    return [(x.clone(), y) for x, y, _ in loader.batches(pipeline, requests, CPU)]


@pytest.mark.parametrize("steps", [(), (RandomResizedCrop(), FlipCrop(pad=0)), (RandomResizedCrop(interpolation="bicubic"),)])
def test_samples_order_and_crops_are_those_of_the_other_loaders(files, steps):
    source = images_of(files, 48, 10**6)
    ours, theirs = (batches(loader, source, steps) for loader in (Loader(), Dali(num_threads=2)))
    assert len(ours) == len(theirs) == 8  # the short one at an epoch's end included
    for (x, y), (x2, y2) in zip(ours, theirs, strict=True):
        assert x.shape == x2.shape
        assert x2.dtype == torch.uint8
        assert torch.equal(y, y2)
        assert (x.float() - x2.float()).abs().mean() < 2


def test_other_kinds_of_files_are_read_as_elsewhere(tmp_path, files):
    exif = Image.Exif()
    exif[0x0112] = 6
    smooth(tmp_path / "turned.jpg", 80, 60, 0, quality=95, exif=exif)
    Image.new("CMYK", (64, 64), (0, 255, 255, 0)).save(tmp_path / "ink.jpg")
    smooth(tmp_path / "plain.png", 70, 50, 1)
    source = images_of([*files, *((tmp_path / n, 1) for n in ("turned.jpg", "ink.jpg", "plain.png"))], 48, 10**6)
    for (x, y), (x2, y2) in zip(*(batches(loader, source) for loader in (Loader(), Dali())), strict=True):
        assert torch.equal(y, y2)
        assert (x.float() - x2.float()).abs().mean() < 2


def test_a_batch_larger_than_the_first_is_read(files):
    source = images_of(files, 32, 10**6)
    requests = [Request(0, torch.arange(n), 1.0) for n in (3, 3, 9, 2, 12)]
    got = [len(x) for x, _, _ in Dali().batches(Pipeline(source, (), None, 0, 3), requests, CPU)]
    assert got == [3, 3, 9, 2, 12]


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 3], lambda b: b"no picture", lambda b: b[:200] + bytes(900)])
def test_damaged_files_are_treated_as_the_other_loaders_treat_them(files, damage):
    path = files[7][0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=path.name):
        batches(Dali(), images_of(files, 32, 10**6))
    ours, theirs = (batches(loader, images_of(files, 32, 10**6, 1.0, "skip", 3)) for loader in (Loader(), Dali()))
    assert [y.tolist() for _, y in ours] == [y.tolist() for _, y in theirs]


def test_a_vanished_file_is_named_after_the_batches_before_it(files):
    source = images_of(files, 32, 10**6)
    files[5][0].unlink()
    requests = [Request(0, torch.arange(n, n + 2), 1.0) for n in (0, 2, 4)]
    stream = Dali().batches(Pipeline(source, (), None, 0, 3), requests, CPU)
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(DataError, match=r"05\.jpg"):
        next(stream)


def test_it_trains(tiny, tmp_path, files):
    for path, label in files:
        (tmp_path / "set" / str(label)).mkdir(parents=True, exist_ok=True)
        path.rename(tmp_path / "set" / str(label) / path.name)
    words = tiny("data=imagefolder", f"data.root={tmp_path / 'set'}", "data.size=16", "data.holdout=0.3", "loader=dali")
    run_to_end(words, updates=2)


def test_data_without_image_files_is_refused(problems):
    assert any("loader=dali" in p and "data=digits" in p for p in problems("data=digits", "loader=dali"))


def test_a_decoder_that_cannot_be_is_refused(problems, files):
    words = ["data=imagefolder", f"data.root={files[0][0].parent}", "loader=dali", "loader.decoder=mixed", "runtime.device=cpu"]
    assert any("loader.decoder=cpu" in p for p in problems(*words))


def test_dali_takes_the_stream_by_position(files):
    """A keyword would be the name of an input, and a stream needs DALI's dynamic executor: what loader=dali relies on."""
    import inspect

    from nvidia.dali import Pipeline as Graph

    from drivetrain.loader.dali import FileBatches, _build_graph

    _, stream, *_ = inspect.signature(Graph.run).parameters.values()
    assert (stream.name, stream.kind) == ("cuda_stream", inspect.Parameter.POSITIONAL_ONLY)
    pipeline = Pipeline(images_of(files, 32, 10**6), (), None, 0, 3)
    assert _build_graph(FileBatches(pipeline, iter([]), 3), 1, 2, None).exec_dynamic
