"""Augmentation on its way through files, loaders, ranks and whole runs."""

import itertools
from pathlib import Path

import pytest
import simplejpeg
import torch
from PIL import Image

from drivetrain.augment.erasing import RandomErasing
from drivetrain.augment.geometry import FlipCrop, RandomResizedCrop
from drivetrain.augment.mixing import CutMix, Mixup
from drivetrain.augment.randaugment import RandAugment
from drivetrain.batch import Batch
from drivetrain.batch.base import Accumulate
from drivetrain.core.order import shuffled
from drivetrain.core.step.microbatch import Request
from drivetrain.core.world import World
from drivetrain.data import Normalize, Tensors
from drivetrain.data.decoding import decode
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.device import Resident
from drivetrain.loader.workers import Workers
from tests.support.sets import images_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
CPU, ONE, ALONE = torch.device("cpu"), 1.0, World()
SAMPLES, CLASSES = 29, 5
SOFT = ["augment=[cutmix,mixup]", "augment.mixup.alpha=1.0"]


def pipeline(*steps) -> Pipeline:
    images = torch.randint(255, (SAMPLES, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Pipeline(Tensors(images, torch.arange(SAMPLES) % CLASSES), steps, Normalize([100.0] * 3, [50.0] * 3), 0, CLASSES)


LISTS = {
    "crop, randaugment, cutmix": lambda: (FlipCrop(), RandAugment(), CutMix()),
    "resized, erasing, mixup": lambda: (RandomResizedCrop(), RandomErasing(prob=0.5), Mixup(alpha=1.0)),
    "cutmix or mixup": lambda: (FlipCrop(), CutMix(prob=0.8), Mixup()),
}


def requests(batch: Batch, world: World = ALONE, epochs=(0, 1)):
    batch.pairs = True
    for epoch in epochs:
        yield from batch.over(shuffled(SAMPLES)).requests(0, epoch, world, drop_last=False)


def whole_update(n: int) -> Request:
    """All of n samples in one update, each with its partner."""
    batch = Batch(n)
    batch.pairs = True
    (request,) = batch.over(shuffled(n)).requests(0, 0, ALONE, True)
    return request


# --- mixing in a pipeline ---


def by_hand(data: Pipeline, epoch: int, batch: Batch) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Sample → what it becomes in an epoch, each read by itself."""
    found = {}
    for request in requests(batch, epochs=[epoch]):
        for index, partner in zip(request.indices, request.mix_with, strict=True):
            x, y = data(Request(epoch, index.view(1), ONE, mix_with=partner.view(1)))
            found[int(index)] = (x[0], y[0])
    return found


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("split", ["world 1 × steps 1", "world 2 × steps 3", "world 3 × steps 1"])
def test_a_sample_is_the_same_however_the_update_is_split(name, split):
    data = pipeline(*LISTS[name]())
    size, steps = int(split[6]), int(split[-1])
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    alone = by_hand(data, 1, Batch(12))
    for rank in range(size):
        for request in requests(Accumulate(12, accumulation_steps=steps), World(rank, size), epochs=[1]):
            x, y = data(request)
            assert len(x) == len(y) == len(request.indices)
            for index, image, target in zip(request.indices.tolist(), x, y, strict=True):
                seen[index] = (image, target)
    assert sorted(seen) == sorted(alone) == list(range(SAMPLES))
    for index, (image, target) in seen.items():
        assert torch.allclose(image, alone[index][0], atol=1e-6), index
        assert torch.allclose(target, alone[index][1]), index
        assert target.sum() == pytest.approx(1)
    assert sum(bool((target > 0).sum() == 2) for _, target in seen.values()) > 10


@pytest.mark.parametrize("mixing", [Mixup, CutMix])
def test_the_share_of_a_pair_differs_by_epoch(mixing):
    data, index, partner = pipeline(mixing(alpha=1.0)), torch.arange(8), torch.arange(8, 16)
    epochs = [data(Request(epoch, index, ONE, mix_with=partner))[1].max(1).values for epoch in (0, 1, 2)]
    for before, after in itertools.pairwise(epochs):
        assert (before != after).sum() > 4
    assert torch.equal(epochs[0], data(Request(0, index, ONE, mix_with=partner))[1].max(1).values)


def test_more_ranks_than_samples_leave_a_partner_for_everyone():
    """The rank that joins with a sample that counts nothing takes that sample's own partner."""
    data, batch = pipeline(CutMix()), Batch(6)
    for rank in range(6):
        *_, tail = requests(batch, World(rank, 6), epochs=[0])  # 29 = 4·6 + 5
        assert len(tail.mix_with) == len(tail.indices) == 1
        assert len(data(tail)[0]) == 1
        if not float(tail.weight):
            first = next(r for r in requests(Batch(6), World(0, 6), epochs=[0]) if torch.equal(r.indices, tail.indices))
            assert torch.equal(first.mix_with, tail.mix_with)


def test_a_partner_that_is_in_the_batch_is_read_once():
    request = Request(0, torch.tensor([4, 7]), 1.0, mix_with=torch.tensor([7, 9]))
    assert request.indices_to_read().tolist() == [4, 7, 9]


def test_targets_follow_the_pixels():
    """Each class is one grey: what of it is in the image is what of it is in the target."""
    n = 400
    labels = torch.arange(n) % 4
    x = (labels * 40 + 40).view(n, 1, 1, 1).expand(n, 1, 60, 60).to(torch.uint8)
    for step in (Mixup(alpha=1.0), CutMix()):
        data = Pipeline(Tensors(x, labels), (step,), None, 0, 4)
        request = whole_update(n)
        images, targets = data(request)
        assert (images.dtype, targets.dtype, targets.shape) == (images.dtype, torch.float32, (n, 4))
        expected = (targets * torch.tensor([40.0, 80, 120, 160])).sum(1)
        assert torch.allclose(images.float().mean((1, 2, 3)), expected, atol=0.01)
        assert torch.allclose(targets.sum(1), torch.ones(n))
        own, partner = labels[request.indices], labels[request.mix_with]
        mixed = own != partner
        shares = targets[torch.arange(n), own]
        assert shares[mixed].mean().item() == pytest.approx(
            0.5 if isinstance(step, Mixup) else 0.69, abs=0.05
        )  # boxes over the edge
        assert (shares[~mixed] == 1).all()


def test_each_sample_takes_one_of_several_mixing_options_with_its_probability():
    n = 2000
    x = torch.arange(n, dtype=torch.float32).view(n, 1, 1, 1).expand(n, 1, 4, 4).contiguous()
    request = whole_update(n)

    def mixed(*steps):
        images = Pipeline(Tensors(x, torch.zeros(n, dtype=torch.long)), steps, None, 0, 2)(request)[0]
        blended = ((images != x[request.indices]) & (images != x[request.mix_with])).flatten(1).any(1)
        return images, blended, (images != x[request.indices]).flatten(1).any(1)

    images, blended, changed = mixed(CutMix(), Mixup(alpha=1.0))
    boxed = ~blended & changed
    assert boxed.float().mean().item() > 0.3
    assert torch.equal(images[boxed], mixed(CutMix())[0][boxed])
    assert torch.equal(images[blended], mixed(Mixup(alpha=1.0))[0][blended])
    for cut, blend, expected in ((1.0, 1.0, 0.5), (0.3, 0.2, 0.2), (0.25, 0.75, 0.75)):
        _, blended, changed = mixed(CutMix(prob=cut), Mixup(alpha=1.0, prob=blend))
        assert blended.float().mean().item() == pytest.approx(expected, abs=0.03)
    assert mixed(CutMix(prob=0.3), Mixup(alpha=1.0, prob=0.2))[2].float().mean().item() == pytest.approx(0.44, abs=0.05)
    assert mixed(Mixup(alpha=1.0, prob=0.25))[2].float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_an_update_that_draws_mixes_all_its_samples_alike():
    """As timm does: one option and one share for all samples, on all ranks and in all micro-batches."""

    def drawn(batch: Batch, world: World) -> dict[int, list[float]]:
        data = pipeline(CutMix(prob=0.4, per="update"), Mixup(alpha=1.0, prob=0.4, per="update"))
        found: dict[int, list[float]] = {}
        for request in requests(batch, world, epochs=range(20)):
            own = torch.nn.functional.one_hot(request.indices % CLASSES, CLASSES).bool()
            mixed = request.indices % CLASSES != request.mix_with % CLASSES
            found.setdefault((request.epoch, request.update), []).extend(data(request)[1][own][mixed].tolist())
        return found

    whole, halves = drawn(Batch(6), World()), drawn(Accumulate(6, accumulation_steps=3), World(1, 2))
    alike = {key: {round(v, 5) for v in values} for key, values in whole.items() if values}
    assert all(len(shares) == 1 for shares in alike.values())
    assert len(set.union(*alike.values())) > 20
    assert 0.1 < sum(shares == {1.0} for shares in alike.values()) / len(alike) < 0.4
    assert all({round(v, 5) for v in values} <= alike.get(key, set()) for key, values in halves.items())


def test_labels_are_mixed_as_classes_are():
    images, classes = torch.randint(255, (SAMPLES, 3, 8, 8), dtype=torch.uint8), torch.arange(SAMPLES) % CLASSES
    labels = torch.nn.functional.one_hot(classes, CLASSES).float()
    request = whole_update(SAMPLES)
    found = [Pipeline(Tensors(images, y), (CutMix(),), None, 0, CLASSES)(request)[1] for y in (classes, labels)]
    assert torch.equal(*found)


@pytest.mark.parametrize("step", [Mixup, CutMix])
def test_never_is_the_image_and_its_label(step):
    data = pipeline(step(prob=0.0))
    plain = pipeline()
    for request in requests(Batch(8)):
        x, y = data(request)
        raw, labels = plain(Request(request.epoch, request.indices, ONE))
        assert torch.equal(x, raw)
        assert torch.equal(y, torch.nn.functional.one_hot(labels, CLASSES).float())


@pytest.mark.parametrize("name", LISTS)
def test_workers_mix_what_the_loop_mixes(name):
    def read(loader):
        return list(
            loader.stream(pipeline(*LISTS[name]()), requests(Accumulate(8, accumulation_steps=2)), CPU, torch.contiguous_format)
        )

    expected, got = read(Loader()), read(Workers(num_workers=2))
    assert len(expected) == len(got) == 16
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert a.y.shape == (len(a.x), CLASSES)


# --- cutting while decoding ---


def picture(path: Path, w: int, h: int, **words) -> Image.Image:
    generator = torch.Generator().manual_seed(w)
    x = torch.nn.functional.interpolate(torch.rand(1, 3, 7, 9, generator=generator), (h, w), mode="bilinear")[0]
    image = Image.fromarray(x.mul(255).to(torch.uint8).permute(1, 2, 0).numpy())
    image.save(path, **words)
    return image


class Fixed:
    interpolation = "bilinear"

    def __init__(self, *box):
        self.box, self.asked = box, []

    def __call__(self, width, height):
        self.asked.append((width, height))
        return self.box


def tensor(image: Image.Image) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_box_is_cut_out_and_resized_once(tmp_path, interpolation):
    image = picture(tmp_path / "a.png", 90, 60)
    box = Fixed(20, 5, 50, 40)
    box.interpolation = interpolation
    expected = image.crop((20, 5, 70, 45)).resize((32, 32), Image.Resampling[interpolation.upper()])
    got = decode((tmp_path / "a.png").read_bytes(), "a.png", 32, 10**6, box)
    assert (got.float() - tensor(expected).float()).abs().max() <= 1  # torch's kernel for bytes rounds its weights
    assert box.asked == [(90, 60)]


@pytest.fixture
def shrunk(monkeypatch) -> list[tuple[int, int]]:
    """Width and height that JPEG files were decoded at, by either library."""
    from PIL import JpegImagePlugin

    sizes: list[tuple[int, int]] = []
    draft, turbo = JpegImagePlugin.JpegImageFile.draft, simplejpeg.decode_jpeg

    def drafted(self, mode, size):
        draft(self, mode, size)
        sizes.append(self.size)

    def decoded(*args, **kwargs):
        pixels = turbo(*args, **kwargs)
        sizes.append(pixels.shape[1::-1])
        return pixels

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", drafted)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", decoded)
    return sizes


def test_a_large_jpeg_is_decoded_small_and_cut_right(tmp_path, shrunk):
    image = picture(tmp_path / "a.jpg", 800, 600, quality=95)
    for box, size in (((100, 50, 600, 500), (200, 150)), ((300, 200, 100, 90), (800, 600)), ((0, 0, 800, 600), (100, 75))):
        got = decode((tmp_path / "a.jpg").read_bytes(), "a.jpg", 64, 10**6, Fixed(*box))
        left, top, w, h = box
        expected = image.crop((left, top, left + w, top + h)).resize((64, 64), Image.Resampling.BILINEAR)
        assert (got.float() - tensor(expected).float()).abs().mean() < 3
        assert shrunk.pop() == size


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_are_of_the_upright_image(tmp_path, shrunk, orientation):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(tmp_path / "a.jpg", 640, 400, quality=95, exif=exif)
    with Image.open(tmp_path / "a.jpg") as image:
        upright = ImageOps.exif_transpose(image)
    assert upright.size == ((640, 400) if orientation < 5 else (400, 640))
    for w, h in ((320, 300), (54, 320)):
        box = Fixed(30, 60, w, h)
        got = decode((tmp_path / "a.jpg").read_bytes(), "a.jpg", 40, 10**6, box)
        assert box.asked == [upright.size]
        expected = upright.crop((30, 60, 30 + w, 60 + h)).resize((40, 40), Image.Resampling.BILINEAR)
        assert (got.float() - tensor(expected).float()).abs().mean() < 3
    assert shrunk[-1] == (640, 400)  # 54 pixels across are to become 40: no smaller will do


@pytest.fixture
def files(tmp_path):
    named = []
    for i in range(12):
        path = tmp_path / f"{i}.png"
        picture(path, 40 + 3 * i, 50)
        named.append((path, i % 3))
    return images_of(named, 24, 10**6)


def test_files_are_cut_at_decoding_and_not_again(files):
    step = RandomResizedCrop()
    data = Pipeline(files, (step, FlipCrop(pad=0)), None, 4, 3)
    indices = torch.tensor([3, 8, 1])
    x, y = data(Request(2, indices, ONE))
    boxes = step.crop_boxes(4, 2, indices)
    cut = torch.stack([files.decoded(i, box) for i, box in zip(indices.tolist(), boxes, strict=True)])
    assert torch.equal(x, FlipCrop(pad=0)(cut, 4, 2, indices))
    assert y.tolist() == [0, 2, 1]
    assert not torch.equal(cut, files.fetch(indices)[0])
    whole = RandomResizedCrop(scale=(1.0, 1.0), ratio=(0.01, 100.0))  # nothing but the whole of it fits
    boxes = [box(50, 50) for box in whole.crop_boxes(0, 0, torch.arange(50))]
    assert all(w * h > 2000 for _, _, w, h in boxes)


def test_files_are_the_same_alone_in_a_worker_and_with_partners(files):
    steps = (RandomResizedCrop(), RandomErasing(), CutMix())
    data = Pipeline(files, steps, Normalize([120.0] * 3, [60.0] * 3), 0, 3)
    batch = Accumulate(6, accumulation_steps=2)
    batch.pairs = True
    wanted = list(itertools.chain(*(batch.over(shuffled(12)).requests(0, epoch, World(), True) for epoch in range(2))))
    one, other = (
        list(loader.stream(data, wanted, CPU, torch.contiguous_format)) for loader in (Loader(), Workers(num_workers=2))
    )
    assert len(one) == len(other) == 8
    for a, b, request in zip(one, other, wanted, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        for k in range(len(request.indices)):
            single = Request(request.epoch, request.indices[k : k + 1], ONE, mix_with=request.mix_with[k : k + 1])
            assert torch.equal(data(single)[0][0], a.x[k])


# --- whole runs ---


@pytest.fixture
def photos(tmp_path) -> list[str]:
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(16):
            picture(tmp_path / "images" / name / f"{i}.png", 20 + i + label, 24)
    return ["data=imagefolder", "data.root=images", "data.size=16", "data.holdout=0.3", "model=resnet9", "model.width=4"]


@pytest.mark.parametrize(
    "chosen",
    ["random_resized_crop", "randaugment", "color_jitter", "random_erasing", "random_resized_crop,flip_crop,randaugment,cutmix"],
)
def test_training_sees_it_and_evaluation_does_not(make, photos, chosen):
    trainer = make(*photos, f"augment=[{chosen}]")
    plain = make(*photos)
    assert len(trainer.train_data.steps) == len(chosen.split(","))
    request = next(trainer.requests())
    (x, y), (raw, hard) = trainer.train_data(request), plain.train_data(Request(0, request.indices, ONE))
    assert x.shape == raw.shape
    assert not torch.equal(x, raw)
    soft = "cutmix" in chosen
    assert y.shape == ((len(raw), 2) if soft else hard.shape)
    test = Request(0, torch.arange(1), ONE)
    for got, expected in zip(trainer.evaluator.data(test), plain.evaluator.data(test), strict=True):
        assert torch.equal(got, expected)
    trainer.fit()
    assert trainer.progress.updates == 2
    assert trainer.progress.final["loss"] > 0


def test_the_loss_of_mixed_targets_is_the_mixture_of_losses(make):
    trainer = make(*SOFT, "loss.label_smoothing=0.2")
    micro = next(iter(trainer.loader.stream(trainer.train_data, trainer.requests(), CPU, torch.contiguous_format)))
    assert micro.y.shape == (12, 4)
    logits = trainer.model(micro.x)
    loss = torch.nn.CrossEntropyLoss(label_smoothing=0.2, reduction="none")
    by_label = torch.stack([loss(logits, torch.full((12,), label)) for label in range(4)], 1)
    loss = trainer.evaluator.loss
    assert loss(logits, micro.y).item() == pytest.approx((by_label * micro.y).sum(1).mean().item(), rel=1e-5)
    coarse = loss(logits.bfloat16(), micro.y)
    assert coarse.dtype == torch.float32
    assert coarse.item() == loss(logits.bfloat16().float(), micro.y).item()  # not computed in 8 bits
    assert loss(logits.double(), micro.y).item() == pytest.approx(loss(logits, micro.y).item(), rel=1e-5)


def test_one_batch_by_heart_needs_no_partners(make):
    trainer = make(*SOFT, "debug=overfit", "batch.global_batch=5")
    assert trainer.train_data.steps == ()
    assert next(trainer.requests()).mix_with is None
    assert next(make(*SOFT, "batch.global_batch=5").requests()).mix_with is not None


@pytest.mark.parametrize("words", [["loss=bce", "loss.target_threshold=0.2"], ["batch.preallocate=true"]], ids=" ".join)
def test_mixing_goes_with(train, words):
    train(*SOFT, *words, updates=2)


def test_what_is_held_on_the_device_is_whole(files):
    """A crop that files are cut to at decoding would be the same one in every epoch, and be cut again."""
    held = Resident()._copy(Pipeline(files, (RandomResizedCrop(),), None, 0, 3), torch.device("cpu"))
    assert torch.equal(held.x, files.fetch(torch.arange(len(files)))[0])
