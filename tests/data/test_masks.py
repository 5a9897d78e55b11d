"""Images with masks, and scenes of digits whose labels and masks are known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.core.errors import DataError, UserError
from drivetrain.data import Splits
from drivetrain.data.base import IGNORE_INDEX
from drivetrain.data.digits import DigitScenes
from drivetrain.data.masks import Masks
from drivetrain.model.shipped import UNet

CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Thirty images whose left half is red and of class 1; the mask's first row does not count."""
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    for i in range(30):
        mask = np.zeros((16, 16), dtype=np.uint8)
        mask[:, :8] = 1
        pixels = np.stack([255 * mask, mask, mask], -1)
        mask[0] = 255
        Image.fromarray(pixels).save(tmp_path / "images" / f"{i}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{i}.png")
    return tmp_path


def test_a_mask_belongs_to_its_image(root):
    splits = Masks(root=str(root), size=8, holdout=0.3).load(CPU)
    x, y = splits.train.fetch(torch.arange(4))
    assert (x.shape, y.shape, splits.classes) == ((4, 3, 8, 8), (4, 8, 8), 2)
    assert y[:, 1:, :4].eq(1).all()
    assert y[:, 1:, 4:].eq(0).all()
    assert x[:, 0, :, 0].eq(255).all()
    full = Masks(root=str(root), size=16, holdout=0.3).load(CPU)
    assert full.train.fetch(torch.tensor([0]))[1][0, 0].eq(IGNORE_INDEX).all()
    assert len(splits.train) + len(splits.test) == 30


def test_what_is_wrong_with_masks_is_named(root):
    with pytest.raises(DataError, match=r"masks have the values 0, 1, 255, and data\.classes=1: set data\.classes"):
        Masks(root=str(root), size=8, classes=1, holdout=0.3).load(CPU)
    (root / "images" / "note.txt").touch()
    (root / "masks" / "7.png").unlink()
    with pytest.raises(UserError, match="1 files have no partner of the same name in images/ and masks/, the first is 7"):
        Masks(root=str(root), size=8).load(CPU)
    (root / "images" / "3.jpg").write_bytes((root / "images" / "3.png").read_bytes())
    with pytest.raises(UserError, match=r"images: 3\.jpg and 3\.png have one name, and a pair has one"):
        Masks(root=str(root), size=8).load(CPU)


def pair(folder: Path, name: str, image: Image.Image, mask: Image.Image, exif: int = 1, **how: Any) -> None:
    """An image, JPEG with an orientation, and its mask as stored."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    tags = Image.Exif()
    tags[0x0112] = exif
    image.save(folder / "images" / f"{name}.jpg", exif=tags, quality=95)
    mask.save(folder / "masks" / f"{name}.png", **how)


def masked(folder: Path, *masks: Image.Image, **settings: Any) -> Splits:
    """A set of masks, each of eight images of noise."""
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    for n in range(max(8, len(masks))):
        pair(folder, f"{n}", Image.fromarray(noise), masks[n % len(masks)])
    return Masks(root=str(folder), size=8, holdout=0.3, validation=None, **settings).load(CPU)


def mask_of(*values: Any, dtype: Any = np.uint8, mode: str | None = None) -> Image.Image:
    """A mask whose columns hold these values, in turn."""
    columns = np.array([values[n % len(values)] for n in range(8)], dtype=dtype)
    image = Image.fromarray(np.tile(columns, (8, 1) if columns.ndim == 1 else (8, 1, 1)))
    return image if mode is None else image.convert(mode)


def with_alpha(image: Image.Image, alpha: int = 255) -> Image.Image:
    image.putalpha(alpha)
    return image


def palette(*values: int) -> Image.Image:
    image = mask_of(*values)
    image.putpalette([channel for n in range(256) for channel in (n * 7 % 256, 255 - n, n)])
    return image


IGNORED = IGNORE_INDEX
MEANT = {  # the masks of a set; the classes of the columns of the first; the names of the classes
    "0 and 255": ([mask_of(0, 255)], [0, 1], ["0", "255"]),
    "0 and 255, in two files": ([mask_of(0), mask_of(255)], [0], ["0", "255"]),
    "0 and 1": ([mask_of(0, 1)], [0, 1], ["0", "1"]),
    "0 and 7": ([mask_of(0, 7)], [0, 1], ["0", "7"]),
    "one bit": ([mask_of(0, 255).convert("1")], [0, 1], ["0", "1"]),
    "0 and 65535": ([mask_of(0, 65535, dtype=np.uint16)], [0, 1], ["0", "65535"]),
    "grey RGB": ([mask_of(0, 255, mode="RGB")], [0, 1], ["0", "255"]),
    "grey with alpha": ([with_alpha(mask_of(0, 255))], [0, 1], ["0", "255"]),
    "grey RGB with alpha": ([with_alpha(mask_of(0, 255, mode="RGB"))], [0, 1], ["0", "255"]),
    "small numbers and 255": ([mask_of(0, 1, 2, 255)], [0, 1, 2, IGNORED], ["0", "1", "2"]),
    "0, 1 and 255 in two files": ([mask_of(0, 255), mask_of(0, 1)], [0, IGNORED], ["0", "1"]),
    "no 0": ([mask_of(1, 2, 3)], [1, 2, 3], ["0", "1", "2", "3"]),
    "16 bits": ([mask_of(0, 1, 2, dtype=np.uint16)], [0, 1, 2], ["0", "1", "2"]),
    "a palette": ([palette(0, 5, 255)], [0, 5, IGNORED], [str(n) for n in range(6)]),
    "a palette of 0 and 255": ([palette(0, 255)], [0, 1], ["0", "255"]),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_the_values_of_masks_mean_follows_from_all_of_them(tmp_path, name):
    masks, classes, names = MEANT[name]
    splits = masked(tmp_path, *masks)
    assert (splits.names, splits.classes) == (names, len(names))
    both = [splits.train.fetch(torch.arange(len(splits.train)))[1], splits.test.fetch(torch.arange(len(splits.test)))[1]]
    assert any(torch.equal(mask, torch.tensor([classes[n % len(classes)] for n in range(8)]).repeat(8, 1)) for mask in both[0])
    assert set(torch.cat(both).unique().tolist()) <= {*range(len(names)), IGNORED}
    said = {
        "0 and 255": "masks: 0 is class 0 (50 %), 255 is class 1 (50 %)", "small numbers and 255": "255 is ignored (25 %)",
        "no 0": ", none is 0",
    }  # fmt: skip
    assert said.get(name, "; masks: ") in splits.inputs


UNCLEAR = {
    "0, 127 and 255": ([mask_of(0, 127, 255)], r"values 0, 127, 255, which are no class numbers: set data\.values"),
    "ids": ([mask_of(0, 1000, 3000, dtype=np.uint16)], r"are no class numbers: set data\.values"),
    "one value": ([mask_of(255)], "the masks have nothing but 255, so there is nothing to learn"),
    "one value and the ignored one": ([mask_of(3, 255)], "the masks have nothing but 3, 255"),
    "soft edges": ([Image.fromarray(np.arange(0, 192, 3, dtype=np.uint8).repeat(3).reshape(8, 24)),
                    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 24))], "192 values .* as soft edges have"),
    "below 0": ([mask_of(-1, 0, 1, dtype=np.int32)], r"values below 0 \(-1, 0, 1\)"),
    "fractions": ([mask_of(0, 0.5, dtype=np.float32)], "has fractions"),
    "colours": ([mask_of((0, 0, 0), (255, 0, 0)), mask_of((0, 0, 0), (0, 0, 0))],
                r"2 colours, set data\.values=\[\[0,0,0\],\[255,0,0\]\], in the order of the classes"),
    "many colours": ([Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8))],
                     "colours, which are no classes"),
    "transparency": ([Image.fromarray(np.random.default_rng(0).integers(0, 9, (8, 8, 4), dtype=np.uint8))],
                     "is transparent in parts"),
    "ink": ([mask_of(0, 255).convert("CMYK")], "is a CMYK image"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCLEAR)
def test_masks_that_do_not_tell_are_refused_with_what_to_set(tmp_path, name):
    masks, says = UNCLEAR[name]
    if name in ("soft edges", "many colours"):
        for n in range(8):
            pair(tmp_path, str(n), Image.new("RGB", masks[0].size), masks[n % len(masks)])
        with pytest.raises(DataError, match=says):
            Masks(root=str(tmp_path), size=8, holdout=0.3).load(CPU)
        return
    ending = {"fractions": ".tif", "below 0": ".tif", "ink": ".tif"}.get(name, ".png")
    noise = Image.new("RGB", (8, 8))
    for n in range(8):
        pair(tmp_path, str(n), noise, mask_of(0, 1))
        (tmp_path / "masks" / f"{n}.png").unlink()
        masks[n % len(masks)].save(tmp_path / "masks" / f"{n}{ending}")
    with pytest.raises(DataError, match=says):
        Masks(root=str(tmp_path), size=8, holdout=0.3).load(CPU)


def test_values_are_the_classes_in_their_order(tmp_path):
    grey = masked(tmp_path / "grey", mask_of(0, 127, 255), values=[127, 0], ignore=255)
    assert grey.names == ["127", "0"]
    assert grey.train.fetch(torch.tensor([0]))[1][0, 0].tolist() == [1, 0, IGNORED, 1, 0, IGNORED, 1, 0]
    red = masked(tmp_path / "red", mask_of((0, 0, 0), (255, 0, 0)), mask_of((0, 0, 0)), values=[[255, 0, 0], [0, 0, 0]])
    assert red.names == ["#ff0000", "#000000"]
    assert red.train.fetch(torch.tensor([0]))[1].unique().tolist() in ([0, 1], [1])
    with pytest.raises(UserError, match=r"masks have the values 127, 255, and the classes are 0"):
        masked(tmp_path / "grey", mask_of(0, 127, 255), values=[0], ignore=None)
    assert masked(tmp_path / "few", mask_of(0, 1), classes=9).classes == 9
    assert masked(tmp_path / "two", mask_of(0, 255), classes=2).names == ["0", "255"]
    with pytest.raises(DataError, match=r"values 0, 255, and data\.classes=3"):  # 255 alone beside 0 would not count
        masked(tmp_path / "two", mask_of(0, 255), classes=3)


def test_a_value_that_comes_later_is_named(tmp_path):
    splits = masked(tmp_path, mask_of(0, 1))
    for n in range(8):
        mask_of(0, 9).save(tmp_path / "masks" / f"{n}.png")
    with pytest.raises(DataError, match=r"\.png has the value 9, which is no class of the other masks"):
        splits.train.fetch(torch.tensor([0]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("data.values=[[0,0,999]]", "a colour is three numbers in brackets (red, green, blue), each from 0 to 255"),
        ("data.values=[0,[1,2,3]]", "list the numbers or the colours of the classes, each once"),
        ("data.values=[1,1]", "each once"),
        ("data.values=[1,2] data.classes=3", "data.classes=3, but data.values lists 2"),
    ],
)
def test_values_that_cannot_be(problems, root, words, says):
    found = problems("task=segmentation", "data=masks", f"data.root={root}", *words.split())
    assert any(says in problem for problem in found), found


# What stores an upright picture for each orientation.
STORED = {
    1: [], 2: [Image.Transpose.FLIP_LEFT_RIGHT], 3: [Image.Transpose.ROTATE_180], 4: [Image.Transpose.FLIP_TOP_BOTTOM],
    5: [Image.Transpose.TRANSPOSE], 6: [Image.Transpose.ROTATE_90], 7: [Image.Transpose.TRANSVERSE],
    8: [Image.Transpose.ROTATE_270],
}  # fmt: skip


def turned(image: Image.Image, orientation: int) -> Image.Image:
    for turn in STORED[orientation]:
        image = image.transpose(turn)
    return image


def scene(wide: int = 48, high: int = 32) -> tuple[Image.Image, Image.Image]:
    """An upright picture of a bright object, off the middle, and its mask."""
    mask = np.zeros((high, wide), dtype=np.uint8)
    mask[3 : high // 2, wide // 2 - 10 : wide // 2] = 255
    pixels = np.stack([np.where(mask, 250, 5)] * 3, -1).astype(np.uint8)
    return Image.fromarray(pixels), Image.fromarray(mask)


def overlap(splits: Splits) -> float:
    """The intersection of the objects in the images and in the masks, over their union."""
    x, y = splits.train.fetch(torch.arange(len(splits.train)))
    bright, marked = x.float().mean(1) > 127, y == 1
    return float((bright & marked).sum() / (bright | marked).sum())


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "upright"])
@pytest.mark.parametrize("orientation", STORED)
def test_an_image_and_its_mask_are_turned_alike(tmp_path, orientation, stored):
    """Sizes tell for the whole set if masks were made of the stored images or of the upright ones."""
    image, mask = scene()
    for n in range(9):
        each = 6 if n % 3 == 0 else orientation  # some whose size tells, since flips and squares do not
        pair(tmp_path, str(n), turned(image, each), turned(mask, each) if stored else mask, each)
    small = turned(mask.resize((24, 16), Image.Resampling.NEAREST), 8 if stored else 1)
    pair(tmp_path, "small", turned(image, 8), small, 8)  # a mask may be of another size
    assert overlap(Masks(root=str(tmp_path), size=32, holdout=0.2, validation=None).load(CPU)) > 0.9


def test_what_does_not_tell_how_a_mask_is_turned_is_refused(tmp_path):
    image, mask = scene()
    for n in range(8):
        pair(tmp_path, str(n), turned(image, 3), turned(mask, 3), 3)
    with pytest.raises(DataError, match=r"8 images are turned by their EXIF, and nothing shows whether their masks are"):
        Masks(root=str(tmp_path), size=32, holdout=0.3).load(CPU)
    pair(tmp_path, "a", image, mask.resize((48, 40)))
    with pytest.raises(DataError, match=r"a\.jpg is 48×32 and its mask 48×40, which is another shape"):
        Masks(root=str(tmp_path), size=32, holdout=0.3).load(CPU)


def test_image_and_mask_have_one_shape_that_need_not_be_square(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    values = np.zeros((40, 60), np.uint8)
    values[:, 20:40] = 1
    for n in range(20):
        Image.fromarray(np.stack([np.roll(values, n, 1) * 200] * 3, 2)).save(tmp_path / f"images/{n}.png")
        Image.fromarray(np.roll(values, n, 1)).save(tmp_path / f"masks/{n}.png")
    data = Masks(root=str(tmp_path), size=[20, 10]).load(CPU)
    x, y = data.train.fetch(torch.arange(len(data.train)))
    assert (data.shape, x.shape[1:], y.shape[1:]) == ((3, 20, 10), (3, 20, 10), (20, 10))
    assert overlap(data) > 0.9


def test_a_scenes_labels_are_the_digits_of_its_mask():
    labels, masks = DigitScenes(kind="labels", samples=56, test_samples=10), DigitScenes(kind="mask", samples=56, test_samples=10)
    labels.targets, masks.targets = "labels", "mask"
    (x, y), (same, mask) = (option.load(CPU).train.fetch(torch.arange(50)) for option in (labels, masks))
    assert torch.equal(x, same)
    seen = torch.stack([(mask == digit + 1).flatten(1).any(1) for digit in range(10)], 1)
    assert torch.equal(seen, y.bool())
    assert 1 < y.sum(1).mean() < 3
    assert x[(mask > 0).unsqueeze(1)].min() >= 4  # ink
    assert x[(mask == 0).unsqueeze(1)].float().mean() < 4  # noise


def test_scenes_are_the_same_every_time_and_the_tests_are_others():
    first, again = (DigitScenes(kind="labels", samples=20, test_samples=20).load(CPU) for _ in range(2))
    assert torch.equal(first.train.x, again.train.x)
    assert not torch.equal(first.train.x, first.test.x)


@pytest.mark.parametrize("shape", [(1, 24, 24), (3, 21, 17)])
def test_a_unet_gives_a_class_for_each_pixel_of_any_size(shape):
    assert UNet(width=4, depth=2).create(shape, 5)(torch.zeros(2, *shape)).shape == (2, 5, *shape[1:])
