"""Images with masks, and scenes of digits whose labels and masks are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.core.errors import DataError, UserError
from drivetrain.data import DigitScenes, Masks
from drivetrain.data.base import IGNORE_INDEX
from drivetrain.model import UNet

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
    splits = Masks(str(root), size=8, holdout=0.3).load(CPU)
    x, y = splits.train.fetch(torch.arange(4))
    assert (x.shape, y.shape, splits.classes) == ((4, 3, 8, 8), (4, 8, 8), 2)
    assert y[:, 1:, :4].eq(1).all()
    assert y[:, 1:, 4:].eq(0).all()
    assert x[:, 0, :, 0].eq(255).all()
    full = Masks(str(root), size=16, holdout=0.3).load(CPU)
    assert full.train.fetch(torch.tensor([0]))[1][0, 0].eq(IGNORE_INDEX).all()
    assert len(splits.train) + len(splits.test) == 30


def test_what_is_wrong_with_masks_is_named(root):
    with pytest.raises(DataError, match=r"has the class 1, and data\.classes=1"):
        Masks(str(root), size=8, classes=1, holdout=0.3).load(CPU).train.fetch(torch.tensor([0]))
    Image.new("RGB", (16, 16)).save(root / "masks" / "3.png")
    with pytest.raises(DataError, match=r"3.png is a RGB image: a mask has one number for each pixel"):
        Masks(str(root), size=8, holdout=0.3).load(CPU)
    (root / "masks" / "7.png").unlink()
    with pytest.raises(UserError, match="1 files have no partner of the same name in images/ and masks/, the first is 7"):
        Masks(str(root), size=8).load(CPU)


def test_a_scenes_labels_are_the_digits_of_its_mask():
    labels, masks = DigitScenes("labels", samples=56, test_samples=10), DigitScenes("mask", samples=56, test_samples=10)
    labels.targets, masks.targets = "labels", "mask"
    (x, y), (same, mask) = (option.load(CPU).train.fetch(torch.arange(50)) for option in (labels, masks))
    assert torch.equal(x, same)
    seen = torch.stack([(mask == digit + 1).flatten(1).any(1) for digit in range(10)], 1)
    assert torch.equal(seen, y.bool())
    assert 1 < y.sum(1).mean() < 3
    assert x[(mask > 0).unsqueeze(1)].min() >= 4  # ink
    assert x[(mask == 0).unsqueeze(1)].float().mean() < 4  # noise


def test_scenes_are_the_same_every_time_and_the_tests_are_others():
    first, again = (DigitScenes("labels", samples=20, test_samples=20).load(CPU) for _ in range(2))
    assert torch.equal(first.train.x, again.train.x)
    assert not torch.equal(first.train.x, first.test.x)


@pytest.mark.parametrize("shape", [(1, 24, 24), (3, 21, 17)])
def test_a_unet_gives_a_class_for_each_pixel_of_any_size(shape):
    model = UNet(width=4, depth=2).create(shape, 5)
    assert model(torch.zeros(2, *shape)).shape == (2, 5, *shape[1:])
