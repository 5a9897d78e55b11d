"""Training data: real digits, made-up tensors, folders of images."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.core.errors import UserError
from drivetrain.core.step import rng
from drivetrain.data import Normalize, listing
from drivetrain.data.decoding import decode
from drivetrain.data.digits import Digits
from drivetrain.data.images import ImageFolder
from drivetrain.data.synthetic import Synthetic
from tests.support.put import put

CPU = torch.device("cpu")
COLOURS = {"cat": (200, 0, 0), "dog": (0, 200, 0), "eel": (0, 0, 200)}


@pytest.fixture
def images(tmp_path: Path) -> Callable[..., Path]:
    """Folders of small one-coloured images: `images("train", 5)` writes five for each class."""

    def write(where: str = "", each: int = 12, names=tuple(COLOURS)) -> Path:
        for name in names:
            folder = tmp_path / "images" / where / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(each):
                Image.new("RGB", (20 + i, 16), COLOURS.get(name, (9, 9, 9))).save(folder / f"{i}.png")
        return tmp_path / "images"

    return write


# --- digits ---


def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    splits = Digits().load(CPU)
    x = torch.cat([splits.test.x, splits.train.x])
    y = torch.cat([splits.test.y, splits.train.y])
    order = rng.permutation(0, 0, 1797)
    images, labels = load_digits(return_X_y=True)
    assert np.array_equal(x.view(1797, 64).numpy(), images[order].astype(np.uint8))
    assert np.array_equal(y.numpy(), labels[order])
    assert (splits.shape, splits.classes) == ((1, 8, 8), 10)


def test_the_split_is_the_same_in_every_run_and_shares_nothing():
    first, second = Digits().load(CPU), Digits().load(CPU)
    assert torch.equal(first.test.x, second.test.x)
    assert (len(first.train), len(first.test)) == (1438, 359)
    assert len(Digits(holdout=0.5).load(CPU).test) == 898
    assert set(first.test.y.tolist()) == set(range(10))


def test_inputs_have_mean_0_and_deviation_1_measured_on_the_training_set():
    splits = Digits().load(CPU)
    x = splits.normalize(splits.train.x)
    assert x.dtype == torch.float32
    assert x.mean().item() == pytest.approx(0, abs=1e-5)
    assert x.std().item() == pytest.approx(1, abs=1e-5)
    raw, large = Digits(normalize=False).load(CPU), Digits(normalize=False, size=16).load(CPU)
    assert torch.equal(raw.normalize(raw.train.x), raw.train.x.float())
    assert (large.train.x.shape[1:], large.shape) == ((1, 16, 16), (1, 16, 16))
    assert (large.train.x.float().mean() - raw.train.x.float().mean()).abs() < 0.1


def test_some_digits_alone_are_numbered_from_0():
    """For pretraining on some classes and fine-tuning on others: no test sample of the one is trained on in the other."""
    every, some = Digits().load(CPU), Digits(classes=[7, 2, 5]).load(CPU)
    for whole, part in ((every.train, some.train), (every.test, some.test)):
        chosen = [int(digit) in (7, 2, 5) for digit in whole.y]
        assert torch.equal(part.x, whole.x[chosen])
        assert [(7, 2, 5)[label] for label in part.y] == whole.y[chosen].tolist()
    assert (some.classes, some.names, every.classes, every.names) == (3, ["7", "2", "5"], 10, None)


@pytest.mark.parametrize("classes", ["[3]", "[1,1]", "[1,10]", "[]"])
def test_digits_that_are_no_classes(problems, classes):
    assert any("data.classes" in problem for problem in problems("data=digits", f"data.classes={classes}"))


def test_normalising_is_per_channel_and_does_not_write_its_input():
    x = torch.randint(255, (4, 3, 5, 5), dtype=torch.uint8)
    for kept in (x, x.float()):
        before = kept.clone()
        out = Normalize([1.0, 2.0, 3.0], [2.0, 4.0, 5.0])(kept)
        expected = (before.double() - torch.tensor([1, 2, 3]).view(3, 1, 1)) / torch.tensor([2, 4, 5]).view(3, 1, 1)
        torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(kept, before)


# --- synthetic ---


def test_synthetic_inputs_are_what_was_asked_for_and_the_same_every_time():
    splits = Synthetic(shape=[2, 5], classes=3, samples=7, test_samples=4).load(CPU)
    x, y = splits.train.fetch(torch.tensor([6, 0, 6]))
    assert x.shape == (3, 2, 5)
    assert torch.equal(x[0], x[2])
    assert set(y.tolist()) <= {0, 1, 2}
    assert (len(splits.train), len(splits.test), splits.classes, splits.normalize) == (7, 4, 3, None)
    again = Synthetic(shape=[2, 5], classes=3, samples=7, test_samples=4).load(CPU)
    assert torch.equal(again.train.x, splits.train.x)
    assert not torch.equal(splits.test.x[:4], splits.train.x[:4])


@pytest.mark.parametrize("word", ["data.shape=3", "data.shape=[3,0]", "data.classes=0", "data.samples=0", "data.test_samples=-1"])
def test_synthetic_settings_are_checked(problems, word):
    assert any("data." in p for p in problems(word))


# --- image folders ---


def test_a_folder_per_class_gives_rgb_images_and_sorted_classes(images):
    splits = ImageFolder(root=str(images()), size=8, holdout=0.3).load(CPU)
    x, y = splits.train.fetch(torch.arange(len(splits.train)))
    assert (x.dtype, x.shape[1:], splits.classes, splits.shape) == (torch.uint8, (3, 8, 8), 3, (3, 8, 8))
    for label, colour in enumerate(COLOURS.values()):
        assert (x[y == label].float().mean((0, 2, 3)).round().tolist()) == list(map(float, colour))


def test_the_held_out_files_are_chosen_by_name_and_stay_when_others_come(images):
    def held_out(root: Path) -> set[Path]:
        splits = ImageFolder(root=str(root), size=8, holdout=0.3).load(CPU)
        train, test = ({Path(s.name(i)) for i in range(len(s))} for s in (splits.train, splits.test))
        assert not train & test
        assert len(train | test) == len(list(root.rglob("*.png")))
        return test

    few = held_out(images(each=12))
    more = held_out(images(each=30))
    assert few
    assert few == {p for p in more if int(p.stem) < 12}
    assert 0.15 < len(more) / 90 < 0.45


def test_train_and_val_folders_are_taken_as_they_are(images):
    images("train", 5)
    splits = ImageFolder(root=str(images("val", 2, ("cat", "eel"))), size=8).load(CPU)
    assert (len(splits.train), len(splits.test), splits.classes) == (15, 4, 3)
    assert sorted(splits.test.labels().tolist()) == [0, 0, 2, 2]  # the training folders' numbers


def layout(root: Path, *names: str, validation: str | None = "auto") -> list[str | None]:
    """The sets' folders that are found in a folder with these: "train/cat/1" is an image."""
    for name in names:
        path = root / (name if "." in name else f"{name}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    named = None if validation == "auto" else [validation] if validation else []
    found = listing.find("root", listing.walk(str(root), [".png"]), named)
    sets = ([folder.path for folder in each.values()] or [None] for each in (found.test, found.validation))
    return [found.train.path, *(path for paths in sets for path in paths), *found.not_read]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["Train/cat/1", "Test/cat/1"], ["Train/", "Test/", None]),
        (["train/cat/1", "validation/cat/1"], ["train/", "validation/", None]),
        (["TRAINING/cat/1", "Val/cat/1", "testing/cat/1"], ["TRAINING/", "testing/", "Val/"]),
        (["training_set/cat/1", "test_set/cat/1"], ["training_set/", "test_set/", None]),
        (
            ["seg_train/seg_train/cat/1", "seg_test/seg_test/cat/1", "seg_pred/seg_pred/1"],
            ["seg_train/seg_train/", "seg_test/seg_test/", None, "seg_pred"],
        ),
        (["train2017/cat/1", "val2017/cat/1"], ["train2017/", "val2017/", None]),
        (["trn/cat/1", "tst/cat/1", "dev/cat/1"], ["trn/", "tst/", "dev/"]),
        (["TrainSet/cat/1", "testset/cat/1", "validationImages/cat/1"], ["TrainSet/", "testset/", "validationImages/"]),
        (
            ["asl_alphabet_train/asl_alphabet_train/A/1", "asl_alphabet_test/asl_alphabet_test/A/1"],
            ["asl_alphabet_train/asl_alphabet_train/", "asl_alphabet_test/asl_alphabet_test/", None],
        ),
        (
            ["training_set/training_set/cat/1", "training_set/training_set/dog/1", "test_set/test_set/cat/1"],
            ["training_set/training_set/", "test_set/test_set/", None],
        ),
        (["archive/photos/train/cat/1", "archive/photos/test/cat/1"], ["archive/photos/train/", "archive/photos/test/", None]),
        (["photos/cat/1", "photos/dog/1"], ["photos/", None, None]),
        (["train/cat/1", "train/dog/1"], ["train/", None, None]),
        (["train/cat/1", "test/cat/1", "notes/cat/1"], ["train/", "test/", None, "notes"]),
        (["train/1", "plane/1", "car/1"], ["", None, None]),  # vehicles
        (["train/steam/1", "train/diesel/1", "bus/city/1", "bus/coach/1"], ["", None, None]),
        (["valid/1", "invalid/1"], ["", None, None]),  # classes of those names
        (["cat/images/1", "dog/images/1"], ["", None, None]),
        (["animals/cat/1", "animals/dog/1", "vehicles/car/1", "vehicles/bus/1"], ["", None, None]),
        (["train_station/1", "bus_station/1"], ["", None, None]),
    ],
)
def test_folders_of_the_usual_names_are_sets(tmp_path, names, found):
    assert layout(tmp_path / "root", *names) == found


def test_the_named_validation_folder_is_it(tmp_path):
    names = ["train/cat/1", "val/cat/1", "valid/cat/1"]
    assert layout(tmp_path, *names, validation="valid") == ["train/", "val/", "valid/"]
    assert layout(tmp_path, "test/cat/1", validation=None) == ["train/", "test/", None, "val", "valid"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train/cat/1", "val/cat/1", "Valid/cat/1"], "has Valid/ and val/, and each could hold the validation images"),
        (["train/cat/1", "Train/cat/1", "val/cat/1"], "each could hold the training images"),
        (["train/cat/1", "test/cat/1", "TEST/cat/1"], "each could hold the test images"),
        (["train/cat/1", "test/1"], "test/ holds no class folders, as train/ does"),
        (["test/cat/1", "cat/1", "dog/1"], "has test/ with class folders, but no train/"),
        (["train/1", "test/1"], "no class folders in train/ and test/"),
        (["train/cat/1.npy", "test/cat/1.npy"], "in train/ and test/ with images (not read: 2 .npy)"),
        (["train/1", "val/cat/1"], "no class folders in train/"),
        (["a/cat/1", "a/dog/1", "b/cat/1", "b/dog/1"], "a/ and b/ hold folders of the same names, such as cat"),
        (["fold1/cat/1", "fold1/dog/1", "fold2/cat/1", "fold2/dog/1"], "hold folders of the same names"),
        (["cat/train/1", "cat/test/1", "dog/train/1", "dog/test/1"], "move the sets above the classes, as train/cat"),
        (["train/cat/1", "train/dog/1", "bus/1", "car/1"], "so it could be a class"),
        (["train2017/cat/1", "train2014/cat/1", "val/cat/1"], "each could hold the training images"),
    ],
)
def test_folders_that_could_be_read_in_two_ways_are_refused(tmp_path, names, said):
    with pytest.raises(UserError, match=re.escape(said)):
        layout(tmp_path, *names)


def test_what_is_no_data_is_left_out_and_what_is_not_read_is_said(images):
    """Hidden and system folders, files of other kinds, images beside the folders, a picture in two kinds; links are followed."""
    root = images()
    before = ImageFolder(root=str(root), size=8, holdout=0.3).load(CPU)
    assert "not read" not in before.inputs
    picture = (root / "cat" / "0.png").read_bytes()
    for junk in ("__MACOSX/cat", "@eaDir", ".ipynb_checkpoints", "cat/.ipynb_checkpoints", "cat/@eaDir"):
        put(root / junk / "x.png", picture)
    for name in ("cat/._0.png", "cat/.hidden.png", "dog/Thumbs.db"):
        (root / name).write_bytes(picture)
    again = ImageFolder(root=str(root), size=8, holdout=0.3).load(CPU)
    assert [again.train.name(i) for i in range(len(again.train))] == [before.train.name(i) for i in range(len(before.train))]
    assert "not read" not in again.inputs
    assert not again.doubts
    for n in range(3):
        (root / "dog" / f"{n}.heic").touch()
    for name in ("notes.txt", "cat/7.jpg", "beside.png"):
        (root / name).write_bytes(picture)
    (root / "eel").rename(root.parent / "elsewhere")
    (root / "eel").symlink_to(root.parent / "elsewhere")
    (root / "eel" / "back").symlink_to(root)  # a circle ends
    linked = ImageFolder(root=str(root), size=8, holdout=0.3).load(CPU)
    assert linked.names == ["cat", "dog", "eel"]
    assert len(linked.train) + len(linked.test) == 37
    said = "inputs: images of 20×16 to 31×16, as 8×8; not read: 3 .heic (pillow-heif reads them), 1 .txt, 1 .png next to the"
    assert linked.inputs.startswith(said)
    many, twice = linked.doubts
    assert "has many files that are not read: 3 .heic (pillow-heif reads them), 1 .txt" in many
    assert "has 1 files of one name and two kinds, which may be the same picture twice: the first is cat/7.jpg" in twice


def test_class_names_are_compared_in_one_unicode_form(tmp_path):
    """macOS writes é as two letters: the training set of one system and the test set of another have the same classes."""
    for name in ("train/caf\u00e9/1", "train/tea/1", "test/cafe\u0301/1", "test/tea/1"):
        (tmp_path / name).parent.mkdir(parents=True)
        Image.new("RGB", (4, 4), (9, 99, 9)).save(tmp_path / f"{name}.png")
    splits = ImageFolder(root=str(tmp_path), size=8, validation=None).load(CPU)
    assert splits.names == ["caf\u00e9", "tea"]
    assert splits.test.labels().tolist() == [0, 1]
    (tmp_path / "train" / "cafe\u0301").mkdir()
    with pytest.raises(UserError, match="two folders in train/ have the name 'caf\u00e9', written differently"):
        ImageFolder(root=str(tmp_path), size=8).load(CPU)


def test_where_the_sets_come_from_is_said(images):
    images("Train", 12)
    origins = ImageFolder(root=str(images("test", 2)), size=8).load_sets(CPU).origins
    assert origins == {"train": "Train/", "test": "test/", "validation": "0.1 of training"}
    assert ImageFolder(root=str(images("Train", 12) / "Train"), size=8, holdout=0.3).load(CPU).origins == {
        "test": "0.3 of the files"
    }


def test_an_empty_class_and_a_folder_without_classes_are_refused(images, tmp_path):
    root = images()
    (root / "fox").mkdir()
    with pytest.raises(UserError, match=r"no image in .*fox"):
        ImageFolder(root=str(root), size=8).load(CPU)
    (tmp_path / "flat").mkdir()
    with pytest.raises(UserError, match="has no class folders"):
        ImageFolder(root=str(tmp_path / "flat"), size=8).load(CPU)
    put(tmp_path / "flat" / "cat" / "1.png", Image.new("RGB", (4, 4), COLOURS["cat"]))
    with pytest.raises(UserError, match="has one class folder, cat/"):
        ImageFolder(root=str(tmp_path / "flat"), size=8).load(CPU)


def test_the_shorter_side_is_resized_and_the_centre_kept(tmp_path):
    image = Image.new("RGB", (64, 16), (255, 0, 0))
    image.paste((0, 255, 0), (24, 0, 40, 16))
    image.save(tmp_path / "wide.png")
    out = decode((tmp_path / "wide.png").read_bytes(), str(tmp_path / "wide.png"), 16, 10**6)
    assert out[1].min() > 250
    assert out[0].max() < 5


@pytest.mark.parametrize(
    ("size", "part"), [([8, 4], (60, 0, 80, 160)), ([20, 10], (60, 0, 80, 160)), ([4, 8], (0, 30, 200, 100))]
)
def test_images_need_not_be_square(size, part):
    """The largest part in the middle that has the shape is kept: height first, as torch says it."""
    width, height = (200, 160)
    pixels = np.zeros((height, width, 3), np.uint8)
    left, top, wide, high = part
    pixels[top : top + high, left : left + wide] = 200
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    found = decode(out.getvalue(), "one.png", size, 10**6)
    assert found.shape == (3, *size)
    assert (found == 200).all()


def test_crop_pct_keeps_the_middle_that_timm_keeps(tmp_path):
    """timm resizes the shorter side to size / crop_pct and keeps the middle; an own box of a random crop is not cut again."""
    from timm.data import create_transform

    rows, columns = torch.meshgrid(torch.arange(240), torch.arange(360), indexing="ij")
    slopes = torch.stack([rows * 255 // 240, columns * 255 // 360, (rows + columns) * 255 // 600], -1).to(torch.uint8)
    for n in range(6):
        put(tmp_path / "images" / "ab"[n % 2] / f"{n}.png", Image.fromarray(slopes.numpy()))
    source = ImageFolder(root=str(tmp_path / "images"), size=112, crop_pct=0.7, holdout=0.4, validation=None).load(CPU).train
    found = source.fetch(torch.tensor([0]))[0][0].float() / 255
    timms = create_transform((3, 112, 112), crop_pct=0.7, mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear")
    torch.testing.assert_close(found, timms(Image.fromarray(slopes.numpy())), atol=0.01, rtol=0)
    whole = ImageFolder(root=str(tmp_path / "images"), size=112, holdout=0.4, validation=None).load(CPU).train
    assert (whole.fetch(torch.tensor([0]))[0][0] / 255 - found).abs().max() > 0.1
    box = type("Box", (), {"interpolation": "bilinear", "__call__": lambda self, w, h: (0, 0, h, h)})()
    assert torch.equal(*(s.fetch(torch.tensor([0]), [box])[0] for s in (source, whole)))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("left", [100, 101, 102, 103])
def test_a_crop_of_a_jpeg_that_is_decoded_small_is_not_shifted(left, interpolation):
    """A small copy is decoded, and a crop begins within its pixels: waves tell how far it is from where it should be."""
    waves = np.tile((127 + 120 * np.sin(np.arange(1002) / 25)).round().astype(np.uint8)[None, :, None], (1000, 1, 3))
    out = io.BytesIO()
    Image.fromarray(waves).save(out, "JPEG", quality=100)
    box = type("Box", (), {"interpolation": interpolation, "__call__": lambda self, w, h: (left, 51, 800, 801)})()
    found = decode(out.getvalue(), "waves.jpg", 100, 10**7, box).double()
    whole = torch.from_numpy(waves[51:852, left : left + 800]).permute(2, 0, 1).unsqueeze(0)
    wanted = torch.nn.functional.interpolate(whole, (100, 100), mode=interpolation, antialias=True)[0].double()
    slope = (wanted[:, :, 2:] - wanted[:, :, :-2]) / 2
    shift = ((found - wanted)[:, :, 1:-1] * slope).sum() / slope.square().sum()
    assert abs(shift) < 0.02, shift  # of a pixel


def test_measured_normalising_is_measured_on_the_training_images(images):
    splits = ImageFolder(root=str(images()), size=8, normalize="measured", holdout=0.3).load(CPU)
    x = splits.normalize(splits.train.fetch(torch.arange(len(splits.train)))[0])
    assert x.mean((0, 2, 3)).abs().max() < 1e-4
    assert (x.std((0, 2, 3)) - 1).abs().max() < 1e-2


def test_imagenets_normalising_is_imagenets(images):
    normalize = ImageFolder(root=str(images()), size=8).load(CPU).normalize
    white = normalize(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
    torch.testing.assert_close(white, torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]))


def test_a_folder_that_is_not_there_is_refused(problems, images):
    assert any("needs data.root" in p for p in problems("data=imagefolder"))
    assert any("data.root=/nowhere is no directory" in p for p in problems("data=imagefolder", "data.root=/nowhere"))
    assert any("data.normalize=no" in p for p in problems("data=imagefolder", f"data.root={images()}", "data.normalize=no"))


@pytest.mark.parametrize("word", ["data.holdout=0", "data.holdout=1.0", "data.holdout=-0.1"])
def test_something_must_be_held_out_and_something_left(problems, word):
    assert any(p.startswith("data.holdout=") for p in problems("data=digits", word))


def test_more_samples_in_a_batch_than_there_are_is_refused(make):
    with pytest.raises(UserError, match=r"batch\.global_batch=\d+ is more than the 48 training samples"):
        make("batch.global_batch=60")
    assert make("batch.global_batch=60", "data.drop_last=false").max_updates == 2
    grows = r"batch.global_batch=24 grows to 96 by batch.grow_every=1, which is more than the 48 .* set batch.grow_until=48"
    with pytest.raises(UserError, match=grows):
        make("batch.global_batch=24", "batch.grow_every=1", "epochs=5", "updates=null")


def test_synthetic_tokens_have_the_next_one_as_their_target(train, make, problems):
    words = ["data=synthetic", "data.tokens=true", "data.shape=[24]", "data.classes=50", "model=gpt", "model.width=16"]
    words += ["model.heads=2", "model.depth=1", "loss=next_token"]
    source = make(*words).train_data.source
    x, y = source.fetch(torch.arange(6))
    assert x.shape == y.shape == (6, 24)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert x.unique().numel() > 30
    assert 0 <= int(x.min()) <= int(x.max()) < 50
    train(*words, updates=2)
    assert any("data.shape to [length]" in p for p in problems("data=synthetic", "data.tokens=true", *words[4:]))
    assert any("set model=gpt" in p for p in problems("data=synthetic", "data.tokens=true", "data.shape=[24]"))


def test_small_images_that_are_enlarged_are_told(images):
    """One line, with the size to set; not where they are as large as what is wanted, or nearly."""
    (said,) = ImageFolder(root=str(images("train") / "train")).load(CPU).doubts
    assert re.search(r"are \d+×16 and are enlarged to 224×224, .*: set data.size=16, unless the model wants 224", said)
    assert not ImageFolder(root=str(images("train") / "train"), size=24).load(CPU).doubts
