"""Images that cannot be read, and images of every kind: named or skipped, and always RGB, right side up."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.augment.geometry import FlipCrop
from drivetrain.batch.base import Accumulate
from drivetrain.core.errors import DataError, UserError
from drivetrain.core.order import shuffled
from drivetrain.core.world import World
from drivetrain.data import Normalize
from drivetrain.data.decoding import BadSamples, Range, decode
from drivetrain.data.images import ImageFolder
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
CPU = torch.device("cpu")
EACH = 15


@pytest.fixture
def images(tmp_path) -> Callable[..., Path]:
    """Two classes of noise in ImageNet's layout: `images(broken=[3])` spoils the fourth training file."""

    def write(broken=(), how: str = "text") -> Path:
        noise = np.random.default_rng(0)
        for split in ("train", "val"):
            for wnid in ("n01440764", "n01443537"):
                folder = tmp_path / "set" / split / wnid
                folder.mkdir(parents=True)
                for i in range(EACH):
                    pixels = noise.integers(0, 255, (12, 10, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{wnid}_{i:03d}.JPEG", quality=95)
        for path in (files(tmp_path / "set")[i] for i in broken):
            spoil(path, how)
        return tmp_path / "set"

    return write


def files(root: Path) -> list[Path]:
    return sorted((root / "train").rglob("*.JPEG"))


def spoil(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:200])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "bomb":  # a header alone, that says 60,000 × 60,000
        size = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
        chunk = struct.pack(">I", 13) + b"IHDR" + size + struct.pack(">I", zlib.crc32(b"IHDR" + size))
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk)
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(b"not an image")


# --- policies ---


@pytest.mark.parametrize("how", ["text", "truncated", "empty", "bomb", "folder"])
def test_a_broken_file_is_named_or_the_next_stands_for_it(images, how):
    root = images(broken=[3, 4, 29], how=how)
    with pytest.raises(DataError, match=r"n01440764_003\.JPEG"):
        ImageFolder(root=str(root), size=8).load(CPU)
    source = ImageFolder(root=str(root), size=8, on_error="skip", max_skipped=3).load(CPU).train
    x, y = source.fetch(torch.tensor([2, 3, 4, 5, 29, 0]))
    assert torch.equal(x[1], x[3])
    assert torch.equal(x[2], x[3])
    assert torch.equal(x[4], x[5])  # after the last comes the first
    assert not torch.equal(x[0], x[1])
    assert y.tolist() == [0, 0, 0, 0, 0, 0]
    assert source.skipped() == [str(files(root)[i]) for i in (3, 4, 29)]


def test_a_file_that_vanishes_is_named_or_skipped(images):
    root = images()
    strict = ImageFolder(root=str(root), size=8).load(CPU).train
    lenient = ImageFolder(root=str(root), size=8, on_error="skip", max_skipped=0.1).load(CPU).train
    files(root)[7].unlink()
    with pytest.raises(DataError, match=r"_007\.JPEG cannot be read as an image .*No such file"):
        strict.fetch(torch.tensor([7]))
    x, _ = lenient.fetch(torch.tensor([7, 8]))
    assert torch.equal(x[0], x[1])


def test_what_may_be_skipped_is_bounded(images):
    root = images(broken=[1, 5, 6])
    for most, allowed in ((2, 2), (0.05, 2), (0, 0)):  # a share is rounded up
        data = ImageFolder(root=str(root), size=8, on_error="skip", max_skipped=most)
        with pytest.raises(DataError, match=rf"{allowed + 1} of 30 samples cannot be read, data\.max_skipped allows {allowed};"):
            data.load(CPU)
    assert len(ImageFolder(root=str(root), size=8, on_error="skip", max_skipped=3).load(CPU).train.skipped()) == 3


def test_a_broken_sample_is_tried_once():
    """Every epoch would decode it again."""
    tried: list[int] = []

    def read(index: int) -> int:
        tried.append(index)
        if index == 1:
            raise DataError("broken")
        return index

    policy = BadSamples("skip", 1, 3)
    assert [policy.read(1, read), policy.read(1, read)] == [2, 2]
    assert tried == [1, 2, 2]


def test_nothing_but_broken_files_is_no_endless_search(images):
    root = images(broken=range(30))
    with pytest.raises(DataError, match="none of the 30 samples can be read"):
        ImageFolder(root=str(root), size=8, on_error="skip", max_skipped=30).load(CPU)


LOADERS = {
    "sync": Loader,
    "workers(1)": lambda: Workers(num_workers=1),
    "workers(3)": lambda: Workers(num_workers=3),
    "threads": lambda: Threads(num_threads=3),
}


def read(loader: Loader, root: Path, world: World | None = None, skip: int = 0):
    """One epoch with broken files, updates of 8 in micro-batches of 4: inputs, targets, and what was skipped."""
    data = ImageFolder(root=str(root), size=8, on_error="skip", max_skipped=5, verify=0)
    source = data.load(CPU).train
    pipeline = Pipeline(source, (FlipCrop(pad=1),), Normalize([100.0] * 3, [50.0] * 3), 0)
    requests = (
        Accumulate(global_batch=8, accumulation_steps=2)
        .over(shuffled(30))
        .requests(0, 1, world or World(), drop_last=False, skip=skip)
    )
    micros = list(loader.stream(pipeline, requests, CPU, torch.contiguous_format))
    return [(m.x, m.y) for m in micros], source.skipped()


@pytest.mark.parametrize("name", LOADERS)
def test_the_order_is_the_same_whoever_reads_and_wherever_it_begins(images, name):
    root = images(broken=[3, 4, 20])
    expected, broken = read(Loader(), root)
    got, counted = read(LOADERS[name](), root)
    assert counted == broken == [str(files(root)[i]) for i in (3, 4, 20)]  # also those that a worker met
    assert len(expected) == len(got) == 8
    assert all(torch.equal(a, b) for one, other in zip(expected, got, strict=True) for a, b in zip(one, other, strict=True))
    resumed, _ = read(LOADERS[name](), root, skip=2)
    assert torch.equal(torch.cat([x for x, _ in resumed]), torch.cat([x for x, _ in expected[4:]]))
    ranks = [read(LOADERS[name](), root, World(rank, 2))[0] for rank in range(2)]
    update = torch.cat([x for rank in ranks for x, _ in rank[:2]])
    assert torch.equal(update, torch.cat([x for x, _ in expected[:2]]))


@pytest.mark.parametrize("more", [[], ["loader=workers"], ["parallel=ddp", "parallel.nproc=2"]], ids=["sync", "workers", "ddp"])
def test_the_number_is_in_the_result_and_the_names_in_the_log(train, images, more):
    broken = [0, 5, 10, 15, 20, 25]  # no rank meets them all
    root = images(broken=broken)
    words = ["data=imagefolder", f"data.root={root}", "data.size=8", "data.verify=0", "data.validation=null",
             "batch.global_batch=10",
             "updates=3"]  # fmt: skip
    result = train(*words, "data.on_error=skip", "data.max_skipped=6", *more)  # 30 samples: an epoch
    assert (result.status, result.skipped_samples) == ("completed", 6), result.error
    assert json.loads((result.run_dir / "result.json").read_text())["skipped_samples"] == 6
    log = (result.run_dir / "log.txt").read_text()
    assert [line for line in log.splitlines() if line.startswith("skipped: ")] == [f"skipped: {files(root)[i]}" for i in broken]
    assert "WARNING rank 0 drivetrain.launch.worker: 6 samples could not be read and were skipped" in log


def test_a_run_without_broken_files_says_none_and_data_that_cannot_skip_says_nothing(train, images):
    words = ["data=imagefolder", f"data.root={images()}", "data.size=8"]
    assert train(*words, "data.on_error=skip").skipped_samples == 0
    assert train().skipped_samples is None


def test_what_cannot_be_is_refused(problems, images):
    words = ["data=imagefolder", f"data.root={images()}"]
    assert any("data.on_error=ignore: must be one of" in p for p in problems(*words, "data.on_error=ignore"))
    assert any("data.max_skipped=-1: must be ≥ 0" in p for p in problems(*words, "data.max_skipped=-1"))


# --- every kind of image ---


def test_imagenets_layout_is_taken_as_it_is(images):
    splits = ImageFolder(root=str(images()), size=8).load(CPU)
    assert (len(splits.train), len(splits.test), splits.classes) == (30, 30, 2)
    assert splits.names == ["n01440764", "n01443537"]
    _, y = splits.test.fetch(torch.tensor([0, 29]))
    assert y.tolist() == [0, 1]


# Top half and bottom half of the picture as it is meant to be seen.
TOP, BOTTOM = (220, 40, 30), (20, 60, 200)


def picture() -> Image.Image:
    image = Image.new("RGB", (32, 32), BOTTOM)
    image.paste(TOP, (0, 0, 32, 16))
    return image


def halves(path: Path) -> tuple[list[float], list[float]]:
    out = decode(path.read_bytes(), str(path), 32, 10**6, scale=Range(0, 65535)).float()
    assert out.shape == (3, 32, 32)
    return out[:, :14].mean((1, 2)).tolist(), out[:, 18:].mean((1, 2)).tolist()


def grey(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    return (0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2],) * 3


KINDS = {
    "rgb.png": (lambda: picture(), False),
    "rgb.jpg": (lambda: picture(), False),
    "grey.png": (lambda: picture().convert("L"), True),
    "grey.jpg": (lambda: picture().convert("L"), True),
    "grey-alpha.png": (lambda: picture().convert("LA"), True),
    "alpha.png": (lambda: picture().convert("RGBA"), False),
    "palette.png": (lambda: picture().quantize(8), False),
    "palette.gif": (lambda: picture().quantize(8), False),
    "cmyk.jpg": (lambda: picture().convert("CMYK"), False),
    "cmyk.tif": (lambda: picture().convert("CMYK"), False),
    "sixteen.png": (lambda: Image.fromarray(np.asarray(picture().convert("L")).astype(np.uint16) * 257), True),
    "sixteen.tif": (lambda: Image.fromarray(np.asarray(picture().convert("L")).astype(np.uint16) * 257), True),
    "webp.webp": (lambda: picture(), False),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_comes_out_in_its_colours(tmp_path, name):
    make, is_grey = KINDS[name]
    make().save(tmp_path / name)
    top, bottom = halves(tmp_path / name)
    assert top == pytest.approx(grey(TOP) if is_grey else TOP, abs=6)
    assert bottom == pytest.approx(grey(BOTTOM) if is_grey else BOTTOM, abs=6)


# How each EXIF orientation is stored: what brings it upright, undone.
STORED = {
    2: [Image.Transpose.FLIP_LEFT_RIGHT], 3: [Image.Transpose.ROTATE_180], 4: [Image.Transpose.FLIP_TOP_BOTTOM],
    5: [Image.Transpose.TRANSPOSE], 6: [Image.Transpose.ROTATE_90], 7: [Image.Transpose.TRANSVERSE],
    8: [Image.Transpose.ROTATE_270],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["jpg", "png"])
@pytest.mark.parametrize("orientation", STORED)
def test_every_orientation_comes_out_upright(tmp_path, orientation, kind):
    image = picture()
    for turn in STORED[orientation]:
        image = image.transpose(turn)
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"turned.{kind}", exif=exif)
    top, bottom = halves(tmp_path / f"turned.{kind}")
    assert top == pytest.approx(TOP, abs=6)
    assert bottom == pytest.approx(BOTTOM, abs=6)


@pytest.mark.parametrize("where", ["late", "xmp"])
def test_an_orientation_is_found_wherever_a_jpeg_has_it(tmp_path, where):
    """Behind 128 KiB of other segments, or in XMP."""
    image, exif = picture().transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" xmlns:tiff="http://ns.adobe.com/tiff/1.0/"><d tiff:Orientation="6"/></x:xmpmeta>'
    image.save(tmp_path / "turned.jpg", **({"exif": exif} if where == "late" else {"xmp": xmp}))
    if where == "late":
        content = (tmp_path / "turned.jpg").read_bytes()
        filler = b"\xff\xe2" + (60_000).to_bytes(2, "big") + bytes(59_998)
        (tmp_path / "turned.jpg").write_bytes(content[:2] + 3 * filler + content[2:])
    top, bottom = halves(tmp_path / "turned.jpg")
    assert top == pytest.approx(TOP, abs=6)
    assert bottom == pytest.approx(BOTTOM, abs=6)


def test_an_empty_class_is_refused(images):
    root = images()
    for path in (root / "train/n01443537").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"no image in .*n01443537"):
        ImageFolder(root=str(root), size=8).load(CPU)
