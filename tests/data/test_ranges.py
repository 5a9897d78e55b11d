"""The range of pixel values: of 8 bits as they are, of more by the files of the set, or as the user says."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.core.errors import DataError
from drivetrain.data.images import ImageFolder
from drivetrain.data.masks import Masks

CPU = torch.device("cpu")


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
    result = drivetrain.train(words)
    assert result.status == "completed", result.error
    transforms = drivetrain.load(result.run_dir).transforms
    Image.fromarray(steps(0, 4095, np.uint16)).save(tmp_path / "new.tif")
    assert (transforms.read_file(tmp_path / "new.tif").int() - torch.tensor(FULL)).abs().max() <= 1
