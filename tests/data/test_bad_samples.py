"""Images of every kind are RGB, right side up, in the range of their set; those that cannot be read are named or skipped."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.augment.geometry import FlipCrop
from drivetrain.batch.base import Accumulate
from drivetrain.core.errors import DataError, UserError, each_read
from drivetrain.core.order import shuffled
from drivetrain.core.world import World
from drivetrain.data import Data, Normalize
from drivetrain.data.decoding import BadSamples, Range, decode
from drivetrain.data.images import ImageFolder
from drivetrain.data.masks import Masks
from drivetrain.launch.job import prepare
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from tests.support.refusals import problems_of
from tests.support.to_end import run_to_end

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


def test_all_broken_files_of_all_sets_are_named_at_once(images):
    root = images([1, 5, 20])
    spoil(sorted((root / "val").rglob("*.JPEG"))[3], "empty")
    with pytest.raises(UserError) as caught:
        ImageFolder(root=str(root), size=8).load(CPU)
    named = [str(files(root)[i]) for i in (1, 5, 20)] + [str(sorted((root / "val").rglob("*.JPEG"))[3])]
    first, second, third, mend, fourth = caught.value.problems
    assert [line.split(" cannot")[0] for line in (first, second, third, fourth)] == named
    assert mend.endswith("3 samples cannot be read: mend or remove them, or set data.on_error=skip data.max_skipped=3")


def test_many_problems_are_told_and_counted():
    def read(number: int) -> int:
        if number % 2:
            raise DataError(f"{number} is odd")
        return number

    made = []
    with pytest.raises(DataError) as caught:
        made.extend(each_read(range(100), read, "{count} are odd: mend them"))
    assert caught.value.problems[0] == "1 is odd"
    assert caught.value.problems[19:] == ["39 is odd", "… and 30 more", "50 are odd: mend them"]
    with pytest.raises(DataError, match=r"^7 is odd$"):
        list(each_read([2, 7], read, "{count} are odd"))


def test_all_rows_and_lines_that_are_wrong_are_named(tmp_path):
    rows = ["a,b,y", *(f"{i},{i % 3},{'yes' if i % 2 else 'no'}" for i in range(40))]
    (tmp_path / "good.csv").write_text("\n".join(rows))
    (tmp_path / "ragged.csv").write_text("\n".join([*rows[:5], "1,2", *rows[5:9], "1,2,3,4", *rows[9:]]))
    (tmp_path / "empty.csv").write_text("\n".join([*rows[:5], "1,2,", *rows[5:9], "1,2,", *rows[9:]]))
    (tmp_path / "other.csv").write_text("\n".join([*rows[:5], "1,2,maybe", *rows[5:9], "1,2,never", *rows[9:]]))
    (tmp_path / "t.jsonl").write_text('{"text": "a b", "label": "x"}\n{broken\n{"text": "c d", "label": "y"}\n{"text": 5}\n')

    def told(**data: Any) -> str:
        caught = problems_of(
            Data.of(prepare([f"{key.replace('_', '.', 1)}={value}" for key, value in data.items()]).run).load, CPU
        )
        return "\n".join(caught)

    table = {"data": "tabular", "data_target": "y", "model": "mlp"}
    said = told(**table, data_path=tmp_path / "ragged.csv")
    assert "ragged.csv:6 has 2 cells" in said
    assert "ragged.csv:11 has 4 cells" in said
    assert "empty.csv:6, 11 have no value in the target column y, 2 of 42 rows" in told(**table, data_path=tmp_path / "empty.csv")
    unknown = told(**table, data_path=tmp_path / "good.csv", data_test=tmp_path / "other.csv")
    assert "other.csv:6, 11: no training row has the class maybe, never of y" in unknown
    days = [rows[0] + ",day", *(f"{row},{n % 28 + 1:02d}.{n % 12 + 1:02d}.2024 1{n % 10}:30" for n, row in enumerate(rows[1:]))]
    (tmp_path / "days.csv").write_text("\n".join(days))
    data = Data.of(prepare(["data=tabular", "data.target=y", "model=mlp", f"data.path={tmp_path / 'days.csv'}"]).run)
    assert data.read()[1][0].columns["day"].style == ["%d.%m.%Y", 5]  # a column settles that days come first; with times
    (tmp_path / "wrong.csv").write_text("\n".join([*days[:4], "1,2,no,31.31.2024", *days[4:6], "1,2,no,soon", *days[6:]]))
    wrong = told(**table, data_path=tmp_path / "wrong.csv", data_columns="{day: date}")
    assert "wrong.csv:5, 8: the column day holds '31.31.2024', 'soon'" in wrong
    assert "dates are read as 2024-01-31, 31.01.2024" in wrong
    lines = told(task="text_classification", data="jsonl", data_path=tmp_path / "t.jsonl", data_label="label", model="gpt")
    assert "t.jsonl:2: not JSON" in lines
    assert "t.jsonl:4 has no 'label'" in lines
    assert lines.endswith("2 lines cannot be read: mend or remove them")


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
    assert result.skipped_samples == 6
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
    "bits.png": (lambda: picture().convert("1"), True),
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


def colours_of_16_bits(pixels: np.ndarray) -> bytes:
    """A PNG with 16 bits for each of its colours, which Pillow does not write."""
    high, wide, channels = pixels.shape

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", wide, high, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def steps(low: float, high: float, dtype: Any, channels: int = 0) -> np.ndarray:
    """Eight columns from the lowest to the highest value."""
    columns = np.linspace(low, high, 8)
    pixels = np.tile(columns if np.issubdtype(dtype, np.floating) else columns.round(), (8, 1)).astype(dtype)
    return np.repeat(pixels[..., None], channels, -1) if channels else pixels


def folder(root: Path, *images: np.ndarray, ending: str = "tif") -> Path:
    """Two classes of these images, in turn."""
    for n in range(12):
        path = root / "ab"[n % 2] / f"{n}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = images[n // 2 % len(images)]
        if pixels.ndim == 3 and pixels.dtype == np.uint16:
            path.write_bytes(colours_of_16_bits(pixels))
        else:
            Image.fromarray(pixels).save(path)
    return root


def loaded(root: Path, **settings: Any) -> Any:
    return ImageFolder(root=str(root), size=8, holdout=0.4, validation=None, **settings).load(CPU)


FULL = [0, 36, 73, 109, 146, 182, 219, 255]  # eight steps from black to white
FOUND = {  # an image of the set; its range; its columns
    "8 bits": (steps(0, 255, np.uint8), None, FULL),
    "8 bits, dark": (steps(0, 51, np.uint8), None, [0, 7, 15, 22, 29, 36, 44, 51]),
    "fractions": (steps(0, 1, np.float32), (0, 1), FULL),
    "dark fractions": (steps(0, 0.2, np.float32), (0, 1), [0, 7, 15, 22, 29, 36, 44, 51]),
    "fractions around 0": (steps(-1, 1, np.float32), (-1, 1), FULL),
    "whole floats": (steps(0, 255, np.float32), (0, 255), FULL),
    "12 bits in 16": (steps(0, 4095, np.uint16), (0, 4095), FULL),
    "10 bits in 16": (steps(0, 1000, np.uint16), (0, 1023), [0, 36, 71, 107, 142, 178, 214, 249]),
    "16 bits": (steps(0, 65535, np.uint16), (0, 65535), FULL),
    "few of 16 bits": (steps(20000, 24000, np.uint16), (20000, 24000), FULL),
    "CT": (steps(-1000, 3000, np.int32), (-1000, 3000), FULL),
    "32 bits": (steps(0, 200_000, np.int32), (0, 200_000), FULL),
    "other fractions": (steps(-3.5, 12.25, np.float32), (-3.5, 12.25), FULL),
    "colours of 12 bits in 16": (steps(0, 4095, np.uint16, 3), (0, 4095), FULL),
    "colours and alpha of 16 bits": (steps(0, 65535, np.uint16, 4), (0, 65535), FULL),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_sets_range_is_that_of_its_files(tmp_path, name):
    pixels, found, columns = FOUND[name]
    splits = loaded(folder(tmp_path, pixels, ending="png" if pixels.ndim == 3 else "tif"))
    assert (splits.pixels and (splits.pixels.low, splits.pixels.high)) == found
    for source in (splits.train, splits.test):
        x, _ = source.fetch(torch.arange(len(source)))
        assert (x.int() - torch.tensor(columns)).abs().max() <= 1
    said = f"{found[0]:g} becomes black and {found[1]:g} white (data.range)" if found else ""
    assert said in splits.inputs


def test_the_user_says_the_range_of_all_files(tmp_path):
    deep, plain = steps(0, 4095, np.uint16), steps(0, 51, np.uint8)
    for n, (pixels, ending) in enumerate([(deep, "tif"), (plain, "png"), (plain, "bmp")]):
        high = float(pixels.max())
        x, _ = loaded(folder(tmp_path / str(n), pixels, ending=ending), range=[0, high]).train.fetch(torch.tensor([0]))
        assert (x.int() - torch.tensor(FULL)).abs().max() <= 3  # 51 has few steps
    smooth = np.repeat(np.repeat(steps(0, 51, np.uint8), 8, 0), 8, 1)
    jpegs = loaded(folder(tmp_path / "jpg", smooth, ending="jpg"), range=[0, 51]).train
    x, _ = jpegs.fetch(torch.tensor([0]))
    assert (x.int() - torch.tensor(FULL)).abs().max() <= 20
    assert not jpegs.image_file_and_layout(0)[1].plain_jpeg  # a loader that decodes it itself would not scale


def test_files_of_8_bits_among_others_stay_as_they_are(tmp_path):
    splits = loaded(folder(tmp_path, steps(0, 4095, np.uint16), steps(0, 51, np.uint8)))
    x = torch.cat([source.fetch(torch.arange(len(source)))[0] for source in (splits.train, splits.test)])
    assert {int(image.max()) for image in x} == {255, 51}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_refused(tmp_path, value):
    pixels = steps(0, 1, np.float32)
    pixels[3, 3] = value
    with pytest.raises(DataError, match="have pixels that are no finite numbers"):
        loaded(folder(tmp_path, pixels))
    if np.isnan(value):  # an infinite one is clipped
        with pytest.raises(DataError, match=r"\.tif has pixels that are no numbers \(NaN\)"):
            loaded(folder(tmp_path, pixels), range=[0, 1])


@pytest.mark.parametrize("pixels", [np.zeros((8, 8), np.float32), np.full((8, 8), 7, np.uint16), np.zeros((8, 8, 3), np.uint8)])
def test_a_set_whose_images_are_all_alike_is_refused(tmp_path, pixels):
    with pytest.raises(DataError, match=f"all pixels of the .* images .* have the value {pixels.flat[0]:g}, so there is nothing"):
        loaded(folder(tmp_path, pixels))


def test_what_lies_beyond_the_range_is_clipped_and_counted(tmp_path, caplog):
    root = folder(tmp_path, steps(0, 1000, np.uint16))
    splits = loaded(root)
    Image.fromarray(steps(0, 4000, np.uint16)).save(splits.train.name(0))
    x, _ = splits.train.fetch(torch.tensor([0, 0]))
    assert x[0, 0, 0].tolist()[-1] == 255
    assert int(splits.pixels.beyond) == 2
    assert caplog.text.count("1 image had values beyond 0 … 1023, which are clipped, the last is") == 1


def test_a_file_of_more_bits_where_the_set_has_8_is_refused(tmp_path):
    splits = loaded(folder(tmp_path, steps(0, 255, np.uint8)))
    Image.fromarray(steps(0, 4000, np.uint16)).save(splits.train.name(0))
    with pytest.raises(DataError, match=r"has numbers of more than 8 bits, .* set data\.range"):
        splits.train.fetch(torch.tensor([0]))


def test_the_images_of_masks_have_a_range_too(tmp_path):
    for kind in ("images", "masks"):
        (tmp_path / kind).mkdir()
    for n in range(12):
        Image.fromarray(steps(0, 4095, np.uint16)).save(tmp_path / "images" / f"{n}.tif")
        Image.fromarray(steps(0, 1, np.uint8)).save(tmp_path / "masks" / f"{n}.png")
    x, _ = Masks(root=str(tmp_path), size=8, holdout=0.3, validation=None).load(CPU).train.fetch(torch.tensor([0]))
    assert (x.int() - torch.tensor(FULL)).abs().max() <= 1


@pytest.mark.parametrize("given", ["[1]", "[3,3]", "[4,1]"])
def test_ranges_that_cannot_be(problems, given):
    assert any("give the lowest and the highest value" in p for p in problems("data=imagefolder", f"data.range={given}"))


def test_a_run_keeps_its_range_for_predictions(tiny, tmp_path):
    root = folder(tmp_path / "set", steps(0, 4095, np.uint16), steps(100, 4000, np.uint16))
    words = tiny("data=imagefolder", f"data.root={root}", "data.size=8", "data.holdout=0.4", "batch.global_batch=4")
    result = run_to_end(words)
    transforms = drivetrain.load(result.run_dir).transforms
    Image.fromarray(steps(0, 4095, np.uint16)).save(tmp_path / "new.tif")
    assert (transforms.read_file(tmp_path / "new.tif").int() - torch.tensor(FULL)).abs().max() <= 1
