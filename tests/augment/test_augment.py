"""Augmentation belongs to the sample and the epoch, and does what it says."""

from types import SimpleNamespace

import pytest
import torch

from drivetrain.augment.erasing import RandomErasing
from drivetrain.augment.geometry import FlipCrop, RandomResizedCrop, batch_crop, batch_flip
from drivetrain.config.catalog import option_files, target
from drivetrain.core.errors import UserError
from drivetrain.core.step.microbatch import Request
from drivetrain.core.step.tensors import Tensors
from drivetrain.core.user.code import import_name
from drivetrain.launch import launcher
from drivetrain.loader.base import Pipeline

IMAGES = torch.arange(2 * 3 * 5 * 6).view(2, 3, 5, 6)


@pytest.mark.parametrize("pad", [1, 2, 4])
def test_crop_equals_torchs_reflected_padding_cut_out(pad):
    padded = torch.nn.functional.pad(IMAGES.float(), (pad,) * 4, mode="reflect").long()
    for dy in range(2 * pad + 1):
        for dx in range(2 * pad + 1):
            out = batch_crop(IMAGES, torch.tensor([dy, 0]), torch.tensor([dx, 2 * pad]), pad)
            assert torch.equal(out[0], padded[0, :, dy : dy + 5, dx : dx + 6])
            assert torch.equal(out[1], padded[1, :, :5, 2 * pad :])


def test_shifts_and_flips_are_uniform():
    n = 20_000
    ramp = torch.arange(64.0).view(1, 1, 8, 8).expand(n, 1, 8, 8)
    flipped = FlipCrop(flip=0.3, pad=0)(ramp, 0, 0, torch.arange(n))[:, 0, 0, 0] == 7
    assert flipped.float().mean().item() == pytest.approx(0.3, abs=0.02)
    shifted = FlipCrop(flip=0.0, pad=2)(ramp, 0, 0, torch.arange(n))[:, 0, 4, 4]
    places, counts = shifted.unique(return_counts=True)
    assert len(places) == 25
    assert counts.min() > 0.8 * n / 25
    assert counts.max() < 1.2 * n / 25


def test_none_is_nothing(make):
    assert make("augment=[none]").train_data.steps == make().train_data.steps == ()


def test_mirrored_digits_are_advised_against(tiny):
    assert any("mirrors digits" in line for line in launcher.prepare(tiny("data=digits", "augment=[flip_crop]")).notices)
    assert not launcher.prepare(tiny("augment=[flip_crop]")).notices


@pytest.mark.parametrize("size", [(5, 6), (120, 130)], ids=["small", "large"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_the_chosen_images_alone_are_mirrored(dtype, memory_format, size):
    x = torch.randint(256, (5, 3, *size)).to(dtype).contiguous(memory_format=memory_format)
    before, which = x.clone(), torch.tensor([True, False, False, True, True])
    out = batch_flip(x, which)
    assert torch.equal(out, torch.where(which.view(-1, 1, 1, 1), before.flip(-1), before))
    assert torch.equal(x, before)


# --- every augmentation of images of one pixel, of a few and of one line: a result, or a refusal before the run ---

OPTIONS = {name: import_name(target(file))() for name, file in option_files()["augment"].items()}
OPTIONS |= {
    "flip_crop.pad=1": FlipCrop(pad=1),
    "random_erasing.prob=1": RandomErasing(prob=1.0),
    "random_resized_crop, wide": RandomResizedCrop(ratio=(3.0, 4.0)),
    "random_resized_crop, high": RandomResizedCrop(ratio=(0.1, 0.2), interpolation="bicubic"),
    "random_resized_crop, small": RandomResizedCrop(scale=(0.001, 0.01)),
}
SIZES = [(1, 1), (1, 3), (3, 1), (2, 2), (4, 4), (1, 40), (40, 1)]
SAMPLES = 24
RUN = SimpleNamespace(data=SimpleNamespace(max_value=None, shape=lambda: None), named=lambda group: f"{group}=own")


@pytest.mark.parametrize("floats", [False, True], ids=["bytes", "floats"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tiny_images_are_augmented_or_refused(name, floats):
    option, refused = OPTIONS[name], 0
    for height, width in SIZES:
        if said := list(option.validate_shape(RUN, (3, height, width))):
            assert all(f"augment.{name.partition('.')[0]}.pad=" in problem for problem in said)
            refused += 1
            continue
        x = torch.randint(256, (SAMPLES, 3, height, width), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        x = x / 255 if floats else x
        pipeline = Pipeline(Tensors(x, torch.arange(SAMPLES) % 4), (option,), None, 0, 4)
        for epoch in range(3):
            changed, targets = pipeline(Request(epoch, torch.arange(SAMPLES), 1.0))
            assert changed.shape == x.shape
            assert bool(changed.isfinite().all() & targets.isfinite().all()), (height, width)
    assert refused == {"flip_crop": len(SIZES), "flip_crop.pad=1": 5}.get(name, 0), "it can be used where it is not refused"


def test_a_shape_that_only_loading_tells_is_judged_then(make, problems, own_module):
    own_module(
        "tiny_own",
        "import torch\n"
        "class Pictures(torch.utils.data.Dataset):\n"
        "    classes = ('a', 'b')\n"
        "    def __init__(self, split): pass\n"
        "    def __len__(self): return 24\n"
        "    def __getitem__(self, index): return torch.rand(1, 4, 4), index % 2\n",
    )
    own = ["data=own", "data.target=tiny_own.Pictures", "trust=[tiny_own]"]
    with pytest.raises(UserError, match=r"augment\.flip_crop\.pad=4 .* not \[1, 4, 4\]: set it to at most 3"):
        make(*own, "augment=[flip_crop]")
    with pytest.raises(UserError, match=r"augment=\[color_jitter\] works on RGB images .* data=own gives 1 channels"):
        make(*own, "augment=[color_jitter]")
    make(*own, "augment=[flip_crop]", "augment.flip_crop.pad=3")
