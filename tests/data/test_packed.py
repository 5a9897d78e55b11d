"""Images packed once: the same samples as their source gives, whatever was killed on the way, and no bit changed since."""

import itertools
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain.augment.geometry import RandomResizedCrop
from drivetrain.cli import main
from drivetrain.core.errors import DataError, UserError
from drivetrain.data import packed, stored
from drivetrain.data.cifar10 import Cifar10
from drivetrain.data.digits import Digits
from drivetrain.data.images import ImageFolder
from drivetrain.data.packed import Packed
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from tests.data.test_cifar10 import write as write_cifar
from tests.loader.test_loader import read as read_all
from tests.loader.test_loader import requests
from tests.support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
CPU = torch.device("cpu")
SRC = Path(drivetrain.__file__).parents[1]


@pytest.fixture
def images(tmp_path) -> Callable[..., Path]:
    """A training and a validation folder of noise: `images(20)` writes twenty of each class."""

    def write(each: int = 20, size: tuple[int, int] = (24, 20)) -> Path:
        noise = np.random.default_rng(0)
        for split in ("train", "val"):
            for name in ("cat", "dog"):
                folder = tmp_path / "images" / split / name
                folder.mkdir(parents=True, exist_ok=True)
                for i in range(each):
                    Image.fromarray(noise.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / f"{i:03d}.jpg", quality=95)
        return tmp_path / "images"

    return write


def pack(*words: str) -> None:
    """The command, which must do it."""
    assert main.main(["pack", *map(str, words)]) == 0


def everything(source) -> tuple[torch.Tensor, torch.Tensor]:
    return source.fetch(torch.arange(len(source)))


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(everything(a), everything(b), strict=True))


def test_packed_images_are_the_folders(images, tmp_path):
    root = images()
    pack(root, tmp_path / "packed", "--size", "16")
    expected = ImageFolder(root=str(root), size=16).load(CPU)
    splits = Packed(root=str(tmp_path / "packed")).load(CPU)
    assert same(splits.train, expected.train)
    assert same(splits.test, expected.test)
    assert (splits.shape, splits.classes, splits.names) == ((3, 16, 16), 2, ["cat", "dog"])
    x, y = splits.train.fetch(torch.tensor([30, 2, 30]))
    assert torch.equal(x[0], x[2])
    assert y.tolist() == [1, 0, 1]
    assert torch.equal(splits.normalize(x), expected.normalize(x))
    assert sorted(p.name for p in (tmp_path / "packed").iterdir() if p.name[0] != ".") == [
        "index.json", "test.data", "test.table", "train.data", "train.table",
    ]  # fmt: skip


@pytest.mark.parametrize("form", [["--size", "16"], ["--size", "16", "--jpeg"]])
def test_the_validation_set_is_a_view_of_the_packed_file(images, tmp_path, form):
    """Held-out samples have the bytes of the whole set's; a set of its own is packed too."""
    root = images()
    pack(root, tmp_path / "packed", *form)
    whole = Packed(root=str(tmp_path / "packed")).load(CPU).train
    sets = Packed(root=str(tmp_path / "packed"), validation=0.25).load_sets(CPU)
    assert (len(sets.train), len(sets.validation)) == (30, 10)
    assert sets.validation.labels().bincount().tolist() == [5, 5]
    rows = {whole.begins[i].item(): i for i in range(len(whole))}
    for source in (sets.train, sets.validation):
        indices = torch.tensor([rows[begin] for begin in source.begins.tolist()])
        assert torch.equal(everything(source)[0], whole.fetch(indices)[0])
    (root / "test").symlink_to(root / "val")
    pack(root, tmp_path / "three", *form)
    three = Packed(root=str(tmp_path / "three")).load_sets(CPU)
    assert (len(three.train), len(three.validation), len(three.test)) == (40, 40, 40)


def test_large_samples_are_asked_for_ahead_and_come_out_the_same(images, tmp_path):
    root = images(4)
    pack(root, tmp_path / "packed", "--size", "96")  # 27 kB each
    splits = Packed(root=str(tmp_path / "packed")).load(CPU)
    assert same(splits.train, ImageFolder(root=str(root), size=96).load(CPU).train)


@pytest.mark.parametrize("data", ["cifar10", "digits"])
def test_any_data_of_whole_numbers_can_be_packed(tmp_path, data):
    if data == "cifar10":
        write_cifar(tmp_path / "set", "py", True)
        pack(tmp_path / "set", tmp_path / "packed", "data=cifar10")
        expected = Cifar10(root=str(tmp_path / "set")).load(CPU)
    else:
        expected = Digits().load(CPU)
        about = "digits"
        (tmp_path / "packed").mkdir()
        packed.pack(expected, tmp_path / "packed", packed.Raw(), expected.shape, about, 2, lambda *_: None)
    splits = Packed(root=str(tmp_path / "packed")).load(CPU)
    assert same(splits.train, expected.train)
    assert (splits.shape, splits.classes) == (expected.shape, 10)
    x = splits.train.fetch(torch.arange(5))[0]
    assert torch.equal(splits.normalize(x), expected.normalize(x))


def test_numbers_that_are_no_bytes_are_refused(tmp_path, refused):
    assert "neither data.root nor data.train" in refused("pack", "x", tmp_path / "packed", "data=synthetic")
    from drivetrain.data.synthetic import Synthetic

    (tmp_path / "packed").mkdir()
    splits = Synthetic().load(CPU)
    with pytest.raises(UserError, match=r"whole numbers from 0 to 255, and this data gives torch\.float32"):
        packed.pack(splits, tmp_path / "packed", packed.Raw(), splits.shape, "", 1, lambda *_: None)


# --- JPEG ---


def test_jpegs_at_the_size_are_kept_byte_for_byte(images, tmp_path):
    root = images()
    pack(root, tmp_path / "packed", "--jpeg", "--size", "32")
    files = sorted((root / "train").rglob("*.jpg"))
    assert (tmp_path / "packed/train.data").read_bytes() == b"".join(p.read_bytes() for p in files)
    splits = Packed(root=str(tmp_path / "packed"), size=16).load(CPU)
    assert same(splits.train, ImageFolder(root=str(root), size=16).load(CPU).train)
    assert splits.shape == (3, 16, 16)
    assert Packed(root=str(tmp_path / "packed")).shape() == (3, 32, 32)


def test_larger_ones_are_shrunk_to_the_size_and_stay_like_themselves(tmp_path):
    smooth = np.linspace(0, 255, 120 * 90).reshape(90, 120)
    for name, value in (("a", smooth), ("b", smooth[:, ::-1])):
        (tmp_path / "images" / "train" / name).mkdir(parents=True)
        (tmp_path / "images" / "val" / name).mkdir(parents=True)
        image = Image.fromarray(np.stack([value, 255 - value, value], -1).astype(np.uint8))
        image.save(tmp_path / "images" / "train" / name / "1.png")
        image.save(tmp_path / "images" / "val" / name / "1.jpg")
    pack(tmp_path / "images", tmp_path / "packed", "--jpeg", "--size", "45", "--quality", "95")
    source = Packed(root=str(tmp_path / "packed"), size=45).load(CPU).train
    with Image.open(__import__("io").BytesIO(bytes(source.stored(0)))) as stored:
        assert (stored.size, stored.format) == ((60, 45), "JPEG")
    expected = ImageFolder(root=str(tmp_path / "images"), size=45).load(CPU).train
    difference = everything(source)[0].float() - everything(expected)[0].float()
    assert difference.abs().mean() < 4


def test_crops_are_cut_while_decoding_the_same_from_files_shards_and_packed_jpegs(images, tmp_path):
    from drivetrain.data.webdataset import WebDataset

    root = images(10, (60, 50))
    pack(root, tmp_path / "packed", "--jpeg", "--size", "64")
    files = sorted((root / "train").rglob("*.jpg"))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for n, path in enumerate(files):
            (tmp_path / "label").write_text(str(n % 2))
            tar.add(path, f"{n:03d}.jpg")
            tar.add(tmp_path / "label", f"{n:03d}.cls")
    shard = str(tmp_path / "a.tar")
    sources = [
        ImageFolder(root=str(root), size=24).load(CPU).train,
        Packed(root=str(tmp_path / "packed"), size=24).load(CPU).train,
        WebDataset(train=shard, test=shard, size=24, cache=str(tmp_path / "cache")).load(CPU).train,
    ]
    indices = torch.tensor([3, 17, 3, 8])
    boxes = RandomResizedCrop().crop_boxes(0, 5, indices)
    cut = [source.fetch(indices, boxes)[0] for source in sources]
    assert torch.equal(cut[0], cut[1])
    assert torch.equal(cut[0], cut[2])
    assert not torch.equal(cut[0], sources[0].fetch(indices)[0])


# --- exactness ---


def test_every_loader_reads_the_same(images, tmp_path):
    pack(images(15), tmp_path / "packed", "--size", "8")
    source = Packed(root=str(tmp_path / "packed")).load(CPU).train
    pipeline = Pipeline(source, (), None, 0)
    wanted = [list(requests()) for _ in range(4)]
    loaders = (Loader(), Workers(num_workers=1), Workers(num_workers=3), Threads(num_threads=2))
    got = [
        [(m.x, m.y) for m in loader.stream(pipeline, want, CPU, torch.contiguous_format)]
        for loader, want in zip(loaders, wanted, strict=True)
    ]
    assert len(got[0]) == len(read_all(Loader()))
    for other in got[1:]:
        assert all(torch.equal(a, b) for one, two in zip(got[0], other, strict=True) for a, b in zip(one, two, strict=True))
    assert int(source.unverified.sum()) == 1  # 29 of 30 were asked for, and verified, whoever read them


def test_a_source_goes_to_another_process_without_its_memory(images, tmp_path):
    pack(images(), tmp_path / "packed", "--size", "64")
    source = Packed(root=str(tmp_path / "packed"), verify=False).load(CPU).train
    before = everything(source)
    sent = pickle.dumps(source)
    assert len(sent) < 10_000 < 64 * 64 * 3 * 40
    assert torch.equal(everything(pickle.loads(sent))[0], before[0])


# --- damage ---


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("form", [[], ["--jpeg"]], ids=["decoded", "jpeg"])
def test_a_flipped_bit_is_found_when_its_sample_is_read_and_by_verify(images, tmp_path, form, capsys, refused):
    out = tmp_path / "packed"
    pack(images(), out, "--size", "32", *form)
    pack("--verify", out)
    assert "all 80 samples are as they were packed" in capsys.readouterr().out
    source = Packed(root=str(out)).load(CPU).train
    place = int(source.table[6, 0]) + 100  # in sample 7
    flip(out / "train.data", place)
    source = Packed(root=str(out)).load(CPU).train
    source.fetch(torch.tensor([6, 8]))
    with pytest.raises(DataError, match=r"train\.data has a sample, number 7, that is not what was packed"):
        source.fetch(torch.tensor([6, 7, 8]))
    assert "sample 7 (class 0) is not what was packed" in refused("pack", "--verify", out)
    unchecked = Packed(root=str(out), verify=False).load(CPU).train
    if not form:
        assert unchecked.fetch(torch.tensor([7]))[0].shape == (1, 3, 32, 32)


def test_damaged_folders_are_refused(images, tmp_path, problems):
    out = tmp_path / "packed"
    pack(images(), out, "--size", "8")
    data = Packed(root=str(out))
    flip(out / "train.table", 200)
    with pytest.raises(DataError, match=r"train\.table is not what was packed"):
        data.load(CPU)
    flip(out / "train.table", 200)
    with (out / "test.data").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError, match=r"test\.data has 1,000 bytes, not 7,680"):
        data.load(CPU)
    (out / "test.data").unlink()
    with pytest.raises(DataError, match=r"test\.data cannot be read"):
        data.load(CPU)
    words = ["data=packed", f"data.root={out}"]
    assert any("decoded already, at 8" in p for p in problems(*words, "data.size=9"))
    index = (out / "index.json").read_text()
    (out / "index.json").write_text(index.replace('"version": 5', '"version": 2'))
    assert any("version 2, and this drivetrain reads 5" in p for p in problems(*words))
    (out / "index.json").write_text("[1]")
    assert any("is no index that drivetrain wrote" in p for p in problems(*words))
    (out / "index.json").unlink()
    assert any("is no packed folder" in p for p in problems(*words))
    assert any("needs data.root" in p for p in problems("data=packed"))


def test_a_table_of_another_length_is_refused(images, tmp_path):
    import hashlib

    out = tmp_path / "packed"
    pack(images(), out, "--size", "8")
    (out / "train.table").write_bytes(bytes(8 * 5))
    index = json.loads((out / "index.json").read_text())
    index["splits"]["train"]["table"] = hashlib.blake2b(bytes(8 * 5)).hexdigest()
    stored.write_index(out, index)
    with pytest.raises(DataError, match=r"train\.table is no table of \d+ samples"):
        Packed(root=str(out)).load(CPU)


def test_reading_packed_samples_parses_no_python(images, tmp_path, monkeypatch):
    pack(images(), tmp_path / "packed", "--size", "8")
    monkeypatch.setattr("ast.parse", None)  # numpy reads the header of an .npy file by ast.literal_eval: unsafe in threads
    monkeypatch.setattr("ast.literal_eval", None)
    train = Packed(root=str(tmp_path / "packed")).load(CPU).train
    assert len(train.fetch(torch.arange(len(train)))[1]) == len(train)


# --- killed, and gone on with ---


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in (".lock",)}


def kill_at_each_third_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are on the disk, and the journal does not count them."""
    write, written = stored.write_json, itertools.count(1)

    def killed(path: Path, content: object) -> None:
        if next(written) % 3 == 0:
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(stored, "write_json", killed)


@pytest.mark.parametrize(
    "form", [[], pytest.param(["--jpeg", "--quality", "70"], marks=pytest.mark.slow)], ids=["decoded", "jpeg"]
)
def test_a_killed_packing_goes_on_to_the_same_bytes(images, tmp_path, form, monkeypatch):
    """Killed after each chunk, its last words cut or doubled; the threads differ as well."""
    monkeypatch.setattr(stored, "CHUNK", 12_000)
    root, out = images(60), tmp_path / "killed"
    pack(root, tmp_path / "whole", "--size", "16", "--threads", "1", *form)
    kill_at_each_third_write(monkeypatch)
    attempts = 0
    while main.main(["pack", str(root), str(out), "--size", "16", "--threads", "3", *form]) == 75:
        attempts += 1
        assert not (out / "index.json").exists()
        with pytest.raises(UserError, match="its packing was not finished"):
            Packed(root=str(out)).load(CPU)
        for name in ("train", "test"):
            if (out / f"{name}.data").exists():
                with (out / f"{name}.data").open("ab") as file:
                    file.write(b"half a chunk")
    assert attempts >= 4
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_kill_from_outside_goes_on_too(images, tmp_path):
    root, out = images(150, (400, 400)), tmp_path / "killed"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    code = "import sys; from drivetrain.cli import main; from drivetrain.data import stored; stored.CHUNK = 100_000; "
    code += "sys.exit(main.main())"
    command = [sys.executable, "-c", code, "pack", str(root), str(out), "--size", "64"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        until(lambda: (out / "train.data").exists() and (out / "train.data").stat().st_size)
        process.send_signal(signal.SIGKILL)
    assert not (out / "index.json").exists()
    begun = (out / "train.data").read_bytes()
    pack(root, out, "--size", "64")
    assert (out / "train.data").read_bytes()[: 64 * 64 * 3] == begun[: 64 * 64 * 3]
    assert same(Packed(root=str(out)).load(CPU).train, ImageFolder(root=str(root), size=64, verify=0).load(CPU).train)


def test_what_was_begun_otherwise_is_not_gone_on_with(images, tmp_path, monkeypatch, refused):
    root, out = images(), tmp_path / "packed"
    with monkeypatch.context() as patch:
        patch.setattr(packed, "write_index", lambda *a: 1 / 0)
        assert main.main(["pack", str(root), str(out), "--size", "8"]) == 1
    assert "was begun with something else" in refused("pack", root, out, "--size", "9")
    pack(root, out, "--size", "8")
    assert "is packed already" in refused("pack", root, out, "--size", "8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["one"], "needs a source and a folder"),
        (["a", "b", "c"], "needs a source and a folder"),
        (["nowhere", "out"], "is no directory"),
        (["nowhere", "out", "--quality", "0"], "--quality must be 1 to 100"),
        (["nowhere", "out", "--size", "0"], "--size and --threads at least 1"),
        (["set", "out", "data=cifar10", "--size", "9"], "--size 9 has no effect on data=cifar10"),
        (["--verify", "nowhere"], "is no packed folder"),
        (["--verify"], "needs one packed folder"),
    ],
)
def test_what_cannot_be_packed_is_refused_and_leaves_nothing(words, says, refused):
    assert says in refused("pack", *words)


def test_broken_images_are_named_while_packing(images, tmp_path, capsys):
    root = images()
    (root / "train/dog/004.jpg").write_bytes(b"nothing")
    assert main.main(["pack", str(root), str(tmp_path / "packed"), "--size", "8"]) == 2
    assert "004.jpg cannot be read as an image" in capsys.readouterr().err
    for number, form in enumerate(([], ["--jpeg"])):
        out = tmp_path / f"packed{number}"
        pack(root, out, "--size", "8", *form, "data.on_error=skip", "data.verify=0")
        assert "another sample was packed instead" in capsys.readouterr().err
        x, y = Packed(root=str(out)).load(CPU).train.fetch(torch.tensor([24, 25]))
        assert torch.equal(x[0], x[1])
        assert y.tolist() == [1, 1]


def test_a_terminal_shows_a_bar_with_its_rate(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stored, "CHUNK", 1)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    pack(images(), tmp_path / "packed", "--size", "8")
    assert re.search(r"40 samples of train packed, [\d,]+/s", capsys.readouterr().err)


def test_its_help_says_how(capsys, says):
    pack("--help")
    assert "drivetrain pack --verify packed" in capsys.readouterr().out
    assert "decode images once" in says()


def test_two_packings_do_not_write_one_folder(images, tmp_path, refused):
    from drivetrain.run import directory

    (tmp_path / "packed").mkdir()
    with directory.locked(tmp_path / "packed"):
        assert "is in use by another process" in refused("pack", images(), tmp_path / "packed", "--size", "8")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_what_is_cut_out_at_reading_is_what_is_cut_out_of_the_whole(images, tmp_path, interpolation):
    pack(images(), tmp_path / "packed", "--size", "48")
    train = Packed(root=str(tmp_path / "packed")).load(CPU).train
    step, rows = RandomResizedCrop(interpolation=interpolation), torch.tensor([5, 0, 17, 3])
    whole, labels = train.fetch(rows)
    cut, same = train.fetch(rows, step.crop_boxes(7, 2, rows))
    assert torch.equal(cut, step(whole.contiguous(), 7, 2, rows))
    assert not torch.equal(cut, whole)
    assert torch.equal(labels, same)
