"""Every augmentation against a reference of one sample at a time; its draws; its refusals."""

import itertools
import math
import subprocess
import sys

import pytest
import torch

from drivetrain.augment import base, color, mixing
from drivetrain.augment import erasing as erasing_module
from drivetrain.augment.color import ColorJitter
from drivetrain.augment.erasing import RandomErasing
from drivetrain.augment.geometry import FlipCrop, RandomResizedCrop, _resize_matrix, _stretched, random_boxes, resized_crop, warp
from drivetrain.augment.mixing import CutMix, Mixup
from drivetrain.augment.randaugment import BINS, OPERATIONS, WIDE, RandAugment, ThreeAugment, TrivialAugment
from drivetrain.core.step import rng
from drivetrain.loss.classification import CrossEntropy

functional = pytest.importorskip("torchvision.transforms.v2.functional")
v2 = pytest.importorskip("torchvision.transforms.v2")


def photographs(n: int, h: int, w: int) -> torch.Tensor:
    """Images with slopes, edges, noise and flat parts, uint8 (n, 3, h, w)."""
    generator = torch.Generator().manual_seed(n * h + w)
    coarse = torch.rand(n, 3, 4, 4, generator=generator)
    x = torch.nn.functional.interpolate(coarse, (h, w), mode="bilinear").mul_(200).add_(20)
    x += 25 * torch.randn(n, 3, h, w, generator=generator)
    x[:, :, : h // 4, : w // 4] = 255
    x[:, :, -h // 4 :, -w // 4 :] = 0
    x[n // 2 :] = 60 + x[n // 2 :] / 2  # half of them are dull
    return x.clamp_(0, 255).to(torch.uint8)


IMAGES = photographs(6, 32, 40)
PLAIN = (FlipCrop, RandomResizedCrop, ColorJitter, RandAugment, RandomErasing, TrivialAugment, ThreeAugment)


def differing(a: torch.Tensor, b: torch.Tensor, by: float = 0) -> float:
    """The share of values that differ by more than this."""
    return ((a.float() - b.float()).abs() > by).float().mean().item()


# --- what all of them owe ---


@pytest.mark.parametrize("option", PLAIN)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_samples_result_does_not_hang_on_its_batch(option, dtype, monkeypatch):
    augment = option()
    x = photographs(24, 16, 16).to(dtype)
    x = x / 255 if dtype == torch.float32 else x
    before, indices = x.clone(), torch.randperm(1000)[:24]
    whole = augment(x, 3, 1, indices)
    assert (whole.dtype, whole.shape) == (dtype, x.shape)
    assert torch.equal(x, before)
    assert not torch.equal(whole, x)
    assert torch.equal(augment(x, 3, 1, indices), whole)
    shuffled = torch.randperm(24)
    same = torch.equal if dtype == torch.uint8 else lambda a, b: torch.allclose(a, b, atol=1e-6)
    assert same(augment(x[shuffled], 3, 1, indices[shuffled]), whole[shuffled])
    parts = [augment(x[i : i + k], 3, 1, indices[i : i + k]) for i, k in ((0, 1), (1, 7), (8, 16))]
    assert same(torch.cat(parts), whole)
    monkeypatch.setattr(base, "CHUNK", 5 * x[0].numel())  # five images at a time, and the last four
    assert same(augment(x, 3, 1, indices), whole)
    assert not torch.equal(augment(x, 4, 1, indices), whole)
    assert not torch.equal(augment(x, 3, 2, indices), whole)


def test_no_two_draws_share_a_stream():
    ranges = {name: value for name, value in vars(base).items() if isinstance(value, range)}
    assert len(ranges) >= 10
    assert all(ranges.values())
    for (a, one), (b, other) in itertools.combinations(ranges.items(), 2):
        assert not set(one) & set(other), (a, b)
    assert not {1, 2, 5} & set(itertools.chain(*ranges.values()))  # of the order and of synthetic data


@pytest.mark.slow
def test_torchvision_is_not_imported():
    code = (
        "import sys, torch; from drivetrain.augment import color, geometry, randaugment; "
        "x, classes = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), (geometry.FlipCrop, geometry.RandomResizedCrop); "
        "[o()(x, 0, 0, torch.arange(4)) for o in (*classes, color.ColorJitter, randaugment.RandAugment)]; "
        "print('done', 'torchvision' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "done False\n", done.stderr


# --- colours ---

FACTORS = torch.tensor([0.0, 0.3, 0.7, 1.0, 1.4, 1.9])


@pytest.mark.parametrize("scale", ["bytes", "floats"])
@pytest.mark.parametrize(
    ("operation", "reference"),
    [
        (color.brightness, functional.adjust_brightness),
        (color.contrast, functional.adjust_contrast),
        (color.saturation, functional.adjust_saturation),
        (color.sharpness, functional.adjust_sharpness),
    ],
)
def test_factors_are_torchvisions_a_sample_at_a_time(operation, reference, scale):
    if scale == "floats":
        ours = operation(IMAGES / 255, FACTORS, 1.0)
        theirs = torch.stack([reference(x / 255, f) for x, f in zip(IMAGES, FACTORS.tolist(), strict=True)])
        assert torch.allclose(ours, theirs, atol=1e-5)
        return
    ours = color.on_bytes(operation)(IMAGES, FACTORS)
    theirs = torch.stack([reference(x, f) for x, f in zip(IMAGES, FACTORS.tolist(), strict=True)])
    assert differing(ours, theirs, by=1) == 0
    assert differing(ours, theirs) < 0.02  # what falls to one or the other side of a whole number
    assert differing(ours, IMAGES) > 0.5


def test_hue_is_torchvisions_a_sample_at_a_time():
    turns = torch.tensor([-0.5, -0.2, 0.0, 0.05, 0.3, 0.5])
    ours = color.hue(IMAGES / 255, turns)
    theirs = torch.stack([functional.adjust_hue(x / 255, t) for x, t in zip(IMAGES, turns.tolist(), strict=True)])
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert torch.allclose(ours[2], IMAGES[2] / 255, atol=1e-6)
    assert not torch.allclose(ours[0], IMAGES[0] / 255, atol=0.1)


def test_jitter_is_its_four_operations_in_their_order():
    jitter = ColorJitter(brightness=0.5, contrast=0.3, saturation=0.6, hue=0.2)
    ours = jitter(IMAGES, 7, 2, torch.arange(6))
    draws = [rng.uniform(7, 2, torch.arange(6), stream).tolist() for stream in base.JITTER]
    theirs = IMAGES / 255
    for operation, spread, drawn in zip(
        (functional.adjust_brightness, functional.adjust_contrast, functional.adjust_saturation),
        (0.5, 0.3, 0.6),
        draws,
        strict=False,
    ):
        theirs = torch.stack([operation(x, 1 - spread + 2 * spread * u) for x, u in zip(theirs, drawn, strict=True)])
    theirs = torch.stack([functional.adjust_hue(x, 0.2 * (2 * u - 1)) for x, u in zip(theirs, draws[3], strict=True)])
    assert differing(ours, theirs * 255, by=4) == 0  # bytes are cut off, and luma is floored twice on the way
    assert differing(ours, IMAGES, by=10) > 0.3


def test_jitter_does_only_what_it_is_asked_for():
    indices = torch.arange(6)
    only = ColorJitter(brightness=0.4, contrast=0, saturation=0, hue=0)(IMAGES, 0, 0, indices)
    factors = 0.6 + 0.8 * rng.uniform(0, 0, indices, base.JITTER[0])
    assert torch.equal(only, color.on_bytes(color.brightness)(IMAGES, factors))
    assert torch.equal(ColorJitter(0, 0, 0, 0)(IMAGES, 0, 0, indices), IMAGES)
    wide = ColorJitter(brightness=3.0, contrast=0, saturation=0, hue=0)  # from 0, not from −2
    assert wide(torch.full((3000, 3, 1, 1), 60, dtype=torch.uint8), 0, 0, torch.arange(3000)).float().mean() == pytest.approx(
        120, rel=0.05
    )


# --- RandAugment ---

NAMES = {
    "identity": "Identity", "shear_x": "ShearX", "shear_y": "ShearY", "translate_x": "TranslateX", "translate_y": "TranslateY",
    "rotate": "Rotate", "brightness": "Brightness", "color": "Color", "contrast": "Contrast", "sharpness": "Sharpness",
    "posterize": "Posterize", "solarize": "Solarize", "autocontrast": "AutoContrast", "equalize": "Equalize",
}  # fmt: skip
MOVES = {"shear_x", "shear_y", "translate_x", "translate_y", "rotate"}


THEIRS = {
    "randaugment": (OPERATIONS, lambda: v2.RandAugment(fill=128)),
    "trivialaugment": (WIDE, lambda: v2.TrivialAugmentWide(fill=128)),
}


def reference(name: str, x: torch.Tensor, magnitude: int, minus: bool, of: str = "randaugment") -> torch.Tensor:
    """torchvision's RandAugment or TrivialAugmentWide with this operation, strength and sign."""
    theirs = THEIRS[of][1]()
    strengths, signed = theirs._AUGMENTATION_SPACE[NAMES[name]]
    strengths = strengths(theirs.num_magnitude_bins, *x.shape[-2:])
    strength = 0.0 if strengths is None else float(strengths[magnitude]) * (-1 if signed and minus else 1)
    return theirs._apply_image_or_video_transform(x, NAMES[name], strength, theirs.interpolation, theirs._fill)


def test_the_operations_are_torchvisions():
    assert [NAMES[name] for name in OPERATIONS] == list(v2.RandAugment._AUGMENTATION_SPACE)
    assert [NAMES[name] for name in WIDE] == list(v2.TrivialAugmentWide._AUGMENTATION_SPACE)
    assert v2.TrivialAugmentWide().num_magnitude_bins == BINS


@pytest.mark.parametrize("of", THEIRS)
@pytest.mark.parametrize("magnitude", [0, 9, 14, 30])
@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation is not None])
def test_an_operation_is_torchvisions_a_sample_at_a_time(name, magnitude, of):
    minus = [True, False, False, True, True, False]
    level = torch.tensor([-1.0 if m else 1.0 for m in minus]) * magnitude / 30
    ours = THEIRS[of][0][name](IMAGES, level, 128)
    theirs = torch.stack([reference(name, x, magnitude, m, of) for x, m in zip(IMAGES, minus, strict=True)])
    if name in MOVES:
        assert differing(ours, theirs) < 0.01  # positions half way between two pixels fall to either
    else:
        assert differing(ours, theirs, by=1) == 0
        assert differing(ours, theirs) < 0.02
    if magnitude == 30 or name in ("equalize", "autocontrast"):
        assert differing(ours, IMAGES) > 0.01


def test_equalize_and_autocontrast_leave_flat_channels():
    flat = torch.full((2, 3, 8, 8), 77, dtype=torch.uint8)
    none = torch.zeros(2)
    assert torch.equal(color.equalize(flat, none), flat)
    assert torch.equal(color.autocontrast(flat, none), flat)


def test_warp_moves_by_whole_pixels_exactly():
    matrix = torch.tensor([[1.0, 0, 2, 0, 1, -1], [1, 0, 0, 0, 1, 0]]).view(2, 2, 3)
    out = warp(IMAGES[:2], matrix, 9)
    assert torch.equal(out[0, :, 1:, :-2], IMAGES[0, :, :-1, 2:])
    assert (out[0, :, 0] == 9).all()
    assert (out[0, :, :, -2:] == 9).all()
    assert torch.equal(out[1], IMAGES[1])


def test_randaugment_is_its_drawn_operations_one_after_the_other():
    n = 40
    x, indices = photographs(n, 16, 16), torch.arange(n)
    ours = RandAugment(n=2, magnitude=12)(x, 5, 1, indices)
    theirs = list(x)
    for slot in range(2):
        names = (rng.uniform(5, 1, indices, base.OPERATION[slot]) * 14).long().tolist()
        minus = (rng.uniform(5, 1, indices, base.SIGN[slot]) < 0.5).tolist()
        theirs = [reference(list(OPERATIONS)[o], t, 12, m) for t, o, m in zip(theirs, names, minus, strict=True)]
    equal = [differing(a, b, by=1) < 0.02 for a, b in zip(ours, theirs, strict=True)]
    assert sum(equal) >= n - 2  # an equalised image tells levels apart that one pixel decided
    assert sum(torch.equal(a, b) for a, b in zip(ours, x, strict=True)) < n / 8


def test_trivialaugment_is_one_drawn_operation_of_any_strength():
    n = 60
    x, indices = photographs(n, 16, 16), torch.arange(n)
    ours = TrivialAugment(fill=128)(x, 5, 1, indices)
    draws = [rng.uniform(5, 1, indices, stream) for stream in base.TRIVIAL]
    names, strengths = (draws[0] * 14).long().tolist(), (draws[1] * 31).long().tolist()
    drawn = zip(x, names, strengths, (draws[2] < 0.5).tolist(), strict=True)
    theirs = [reference(list(WIDE)[o], t, k, m, "trivialaugment") for t, o, k, m in drawn]
    assert sum(differing(a, b, by=1) < 0.02 for a, b in zip(ours, theirs, strict=True)) >= n - 2
    assert len(set(strengths)) > 20


def test_three_augment_is_grey_solarized_or_blurred():
    n = 30
    x, indices = photographs(n, 20, 24), torch.arange(n)
    ours = ThreeAugment()(x, 5, 1, indices)
    chosen, deviation = (rng.uniform(5, 1, indices, stream) for stream in base.THREE)
    kinds = (chosen * 3).long().tolist()
    assert set(kinds) == {0, 1, 2}
    for sample, made, kind, share in zip(x, ours, kinds, deviation.tolist(), strict=True):
        theirs = [
            lambda t: functional.rgb_to_grayscale(t, 3),
            lambda t: functional.solarize(t, 128),
            lambda t, s=share: functional.gaussian_blur(t, [13, 13], [0.1 + 1.9 * s] * 2),
        ][kind](sample)
        assert differing(made, theirs, by=1) == 0
        assert differing(made, theirs) < 0.02


# --- crops ---


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_are_torchvisions_a_sample_at_a_time(interpolation):
    top, left = torch.tensor([0, 3, 10, 31, 0, 7]), torch.tensor([0, 5, 20, 39, 0, 1])
    height, width = torch.tensor([32, 20, 22, 1, 5, 24]), torch.tensor([40, 30, 7, 1, 40, 25])
    mode = functional.InterpolationMode(interpolation)
    boxes = zip(IMAGES, *(t.tolist() for t in (top, left, height, width)), strict=True)
    theirs = torch.stack([functional.resized_crop(x, *box, [32, 40], mode, antialias=True) for x, *box in boxes])
    ours = resized_crop(IMAGES, top, left, height, width, interpolation)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[0], IMAGES[0])
    matrices = (_resize_matrix(*axis, interpolation) for axis in ((top, height, 32), (left, width, 40)))
    on_a_device = _stretched(IMAGES, *matrices)
    assert on_a_device.dtype == torch.uint8
    assert differing(on_a_device, theirs, by=2) == 0  # torch's weights for bytes are whole numbers
    assert differing(on_a_device, theirs, by=1) < 1e-3
    in_float = resized_crop(IMAGES.double(), top, left, height, width, interpolation)
    assert in_float.dtype == torch.float64
    assert differing(in_float.clamp(0, 255), theirs, by=2) < 0.01


def drawn(n: int, scale=(0.08, 1.0), ratio=(0.75, 4 / 3), h: int = 40, w: int = 60):
    draws = torch.stack([rng.uniform(0, 0, torch.arange(n), stream) for stream in base.CROP])
    return random_boxes(draws, h, w, scale, ratio)


def test_boxes_lie_inside_and_are_distributed_as_torchvisions():
    n = 4000
    top, left, height, width = drawn(n)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height).max() == 40
    assert (left + width).max() == 60
    torch.manual_seed(0)
    theirs = v2.RandomResizedCrop(8)
    boxes = [theirs.make_params([torch.empty(3, 40, 60)]) for _ in range(n)]
    for ours, setting in ((top, "top"), (left, "left"), (height, "height"), (width, "width")):
        their = torch.tensor([float(b[setting]) for b in boxes])
        assert ours.float().mean().item() == pytest.approx(their.mean().item(), rel=0.06)
        assert ours.float().std().item() == pytest.approx(their.std().item(), rel=0.06)


@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1.0), (0.75, 4 / 3)), ((1.0, 1.0), (3.0, 4.0)), ((1.0, 1.0), (0.1, 0.2))])
def test_a_box_for_a_file_is_the_box_for_an_image_in_memory(scale, ratio):
    option = RandomResizedCrop(scale=scale, ratio=ratio)
    boxes = [box(60, 40) for box in option.crop_boxes(0, 0, torch.arange(500))]
    top, left, height, width = (t.tolist() for t in drawn(500, scale, ratio))
    assert boxes == list(zip(left, top, width, height, strict=True))
    assert len(set(boxes)) > (400 if scale[0] < 1 else 0)


# --- erasing ---


def test_erased_boxes_are_one_rectangle_in_the_given_share_of_images():
    n = 4000
    x = torch.zeros(n, 1, 24, 24)
    erasing = RandomErasing(prob=0.3, scale=(0.1, 0.2), ratio=(0.5, 2.0), fill="mean")
    out = erasing(x, 0, 0, torch.arange(n), torch.ones(1, 1, 1))
    erased = out.flatten(1).sum(1) > 0
    assert erased.float().mean().item() == pytest.approx(0.3, abs=0.025)
    for image in out[erased][:50, 0]:
        rows, cols = image.amax(1) > 0, image.amax(0) > 0
        assert torch.equal(image > 0, rows.view(-1, 1) & cols)
        assert int(rows.nonzero()[-1] - rows.nonzero()[0]) + 1 == rows.sum()
    shares = out[erased].mean((1, 2, 3))
    assert shares.min() > 0.08
    assert shares.max() < 0.22
    assert shares.mean().item() == pytest.approx(0.15, abs=0.01)
    covered = out[erased].mean((0, 1))
    assert covered[12, 12] > covered[0, 0] > 0
    assert torch.equal(RandomErasing(prob=0.0)(x, 0, 0, torch.arange(n)), x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_noise_is_noise(dtype):
    x = torch.zeros(20, 3, 32, 32, dtype=dtype)
    keys = torch.arange(20, dtype=torch.int32).view(20, 1, 1, 1) * 77_777
    noise = erasing_module.noise(erasing_module._places(x), keys, dtype)
    assert noise.dtype == dtype
    values = noise.double()
    mean, std = (127.5, 73.9) if dtype == torch.uint8 else (0.0, 1.0)
    assert values.mean().item() == pytest.approx(mean, abs=std / 40)
    assert values.std().item() == pytest.approx(std, rel=0.02)
    flat = values.flatten(1)
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.08  # of two images
    assert torch.corrcoef(torch.stack([flat[:, :-1].flatten(), flat[:, 1:].flatten()]))[0, 1].abs() < 0.02  # of neighbours
    assert len({tuple(row) for row in flat[:, :8].tolist()}) == 20


@pytest.mark.parametrize("fill", ["noise", "mean"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_device_erases_at_once_what_a_cpu_erases_one_by_one(fill, dtype, monkeypatch):
    x, erasing, mean = IMAGES.to(dtype), RandomErasing(prob=0.7, fill=fill), torch.tensor([9.6, 120.0, 7.0]).view(3, 1, 1)
    at_once = erasing(x, 0, 0, torch.arange(6), mean)
    monkeypatch.setattr(erasing_module, "LARGE", 1)
    monkeypatch.setattr(erasing_module, "_at_once", None)
    one_by_one = erasing(x, 0, 0, torch.arange(6), mean)
    assert torch.equal(at_once, one_by_one)
    assert differing(one_by_one, x) > 0.02
    if fill == "mean":
        values = one_by_one[one_by_one != x].unique()
        assert set(values.tolist()) <= ({10, 120, 7} if dtype == torch.uint8 else set(mean.flatten().tolist()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_where_is_torchs(dtype):
    a, b = IMAGES.to(dtype), IMAGES.flip(0).to(dtype)
    mask = torch.rand(6, 1, 32, 40) < 0.5
    assert torch.equal(base.where(mask, a, b), torch.where(mask, a, b))
    assert torch.equal(base.where(mask, a, b[:1, :1, :1, :1]), torch.where(mask, a, b[:1, :1, :1, :1]))


# --- mixing ---


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.4, 1.0, 2.0, 8.0])
def test_quantiles_are_betas(alpha):
    stats = pytest.importorskip("scipy.stats")
    u = torch.linspace(0, 1 - 2**-24, 20_001)
    theirs = torch.from_numpy(stats.beta(alpha, alpha).ppf(u.double().numpy()))
    ours = mixing.quantile(u, alpha).double()
    # Where a quantile moves by much for the last bit of u, it is the probability that must be right.
    again = torch.from_numpy(stats.beta(alpha, alpha).cdf(ours.numpy()))
    assert (((ours - theirs).abs() < 2e-4) | ((again - u).abs() < 1e-5)).all()
    assert (ours.diff() >= 0).all()
    assert ours[0] < 1e-3
    assert mixing.quantile(rng.uniform(0, 0, torch.arange(50_000), 141), alpha).var().item() == pytest.approx(
        1 / (4 * (2 * alpha + 1)), rel=0.03
    )


def test_mixup_is_the_weighted_mean():
    share = torch.tensor([1.0, 0.0, 0.25, 0.6, 0.5, 0.9])
    other = IMAGES.flip(0)
    out, own = Mixup().mix(IMAGES, other, share)
    assert out.dtype == torch.float32
    assert own is share
    expected = IMAGES.double() * share.view(-1, 1, 1, 1) + other.double() * (1 - share).view(-1, 1, 1, 1)
    assert torch.allclose(out.double(), expected, atol=1e-4)
    assert torch.equal(out[0], IMAGES[0].float())
    assert Mixup().mix(IMAGES.double(), other.double(), share)[0].dtype == torch.float64


def test_cutmix_is_the_papers_box():
    """Yun et al. 2019, algorithm 1 of the appendix, in plain numbers."""
    n, h, w = 500, 12, 18
    generator = torch.Generator().manual_seed(0)
    share, at_row, at_col = torch.rand(3, n, generator=generator)
    share[0] = 1.0
    own, other = torch.zeros(n, 3, h, w, dtype=torch.uint8), torch.ones(n, 3, h, w, dtype=torch.uint8)
    out, kept = CutMix().mix(own, other, share, at_row, at_col)
    assert out.dtype == torch.uint8
    for i in range(n):
        cut = math.sqrt(1 - float(share[i]))
        row, col = int(float(at_row[i]) * h), int(float(at_col[i]) * w)
        up, down = max(row - int(h * cut / 2), 0), min(row + int(h * cut / 2), h)
        left, right = max(col - int(w * cut / 2), 0), min(col + int(w * cut / 2), w)
        expected = torch.zeros(3, h, w, dtype=torch.uint8)
        expected[:, up:down, left:right] = 1
        assert torch.equal(out[i], expected), i
        assert float(kept[i]) == pytest.approx(1 - expected.float().mean().item(), abs=1e-6)
    assert torch.equal(out[0], own[0])
    assert (out == 1).any()


# --- refusals ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *(
            (
                [f"data={data}", "model=resnet9", f"augment=[{o}]"],
                f"augment=[{o}] works on RGB images with values 0 … 255; data={data}",
            )
            for o in ("randaugment", "trivialaugment", "three_augment", "color_jitter")
            for data in ("digits", "synthetic")
        ),
        *(
            (
                ["data.shape=[12]", f"augment=[{o}]"],
                f"augment=[{o}] works on images (channels, height, width); data=synthetic gives [12]",
            )
            for o in ("random_resized_crop", "random_erasing", "mixup", "cutmix")
        ),
        (["augment=[flip_crop]", "augment.flip_crop.flip=1.5"], "augment.flip_crop.flip=1.5"),
        (["augment=[flip_crop]", "augment.flip_crop.flip=0", "augment.flip_crop.pad=0"], "does nothing"),
        (["augment=[flip_crop]", "augment.flip_crop.pad=8"], "needs images larger"),
        (["augment=[mixup,flip_crop]"], "write it last, [flip_crop,mixup]"),
        (["augment=[cutmix,flip_crop,mixup]"], "write it last, [flip_crop,cutmix,mixup]"),
        (["augment=[flip_crop,random_resized_crop]"], "write it first, [random_resized_crop,flip_crop]"),
        (["augment=[mixup]", "augment.mixup.prob=0.0"], "augment.mixup.prob=0 does nothing"),
        (
            ["augment=[mixup,cutmix]", "augment.cutmix.per=update"],
            "augment.mixup.per=sample: one of them is drawn: set both alike",
        ),
        (["augment=[mixup]", "loss=bce", "loss.pos_weight=balanced"], "set it to null, or loss=cross_entropy"),
        (["augment=[mixup]", "augment.mixup.alpha=0.0"], "augment.mixup.alpha=0.0: must be > 0"),
        (["augment=[random_erasing]", "augment.random_erasing.prob=0.0"], "augment.random_erasing.prob=0 does nothing"),
        (["augment=[random_erasing]", "augment.random_erasing.scale=[0.3,0.1]"], "begins above its end"),
        (["augment=[random_resized_crop]", "augment.random_resized_crop.scale=[0.3,1.1]"], "at most 1"),
        (["augment=[random_resized_crop]", "augment.random_resized_crop.scale=[0.3]"], "random_resized_crop.scale=[0.3]"),
        (["augment=[randaugment]", "augment.randaugment.magnitude=31"], "augment.randaugment.magnitude=31"),
        (["augment=[color_jitter]", "augment.color_jitter.hue=0.6"], "augment.color_jitter.hue=0.6: must be ≤ 0.5"),
        (["data=digits", "model=resnet9", "augment=[random_erasing]"], "set augment.random_erasing.fill=mean"),
    ],
)
def test_what_cannot_be_is_refused(problems, words, says):
    said = problems(*words)
    assert any(says in p for p in said), said


def test_a_loss_of_hard_labels_is_refused_with_both_names(problems, monkeypatch):
    monkeypatch.setattr(CrossEntropy, "soft_targets", False)
    said = problems("augment=[cutmix]")
    assert any("augment=[cutmix]" in p and "loss=cross_entropy takes one" in p for p in said)


@pytest.mark.parametrize("words", [["augment=[none,mixup]"], ["augment=[flip_crop,cutmix,mixup]"], ["augment=[mixup,none]"]])
def test_what_can_be_is_not_refused(make, words):
    assert make(*words).train_data.steps
