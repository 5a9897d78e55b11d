"""Tar shards, here and on a web server: every sample once in an exact order, and nothing taken from where it should not."""

import functools
import http.server
import io
import itertools
import json
import os
import re
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from drivetrain.batch import Batch
from drivetrain.batch.base import Accumulate
from drivetrain.cli import main
from drivetrain.core.errors import DataError, UserError
from drivetrain.core.order import Order, shuffled
from drivetrain.core.world import World
from drivetrain.data import webdataset
from drivetrain.data.packed import Packed
from drivetrain.data.webdataset import WebDataset
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from tests.support.same_end import resumed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
CPU = torch.device("cpu")
EACH = 10  # samples of a shard


def encoded(number: int, kind: str) -> bytes:
    """A one-coloured image that says its number."""
    out = io.BytesIO()
    Image.new("RGB", (9, 8), (number, 255 - number, 7)).save(out, {"jpg": "JPEG"}.get(kind, kind))
    return out.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def shard(path: Path, numbers, kind: str = "png", label: str = "cls", form: int = tarfile.PAX_FORMAT, extra=()) -> Path:
    """A shard of samples whose class is their number modulo 5."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for n in numbers:
            add(tar, f"some/folder/{n:05d}.{kind}", encoded(n, kind))
            content = str(n % 5) if label == "cls" else json.dumps({"label": n % 5, "text": "é"})
            add(tar, f"some/folder/{n:05d}.{label}", content.encode())
            add(tar, f"some/folder/{n:05d}.txt", b"a caption")
        for name, content in extra:
            add(tar, name, content)
    return path


@pytest.fixture
def four(tmp_path) -> Path:
    """Four shards of ten samples, numbered through, and one for the test."""
    for k in range(4):
        shard(tmp_path / f"set/train-{k:03d}.tar", range(k * EACH, (k + 1) * EACH))
    shard(tmp_path / "set/test.tar", range(200, 207))
    return tmp_path / "set"


def data(root: object, **settings) -> WebDataset:
    return WebDataset(
        **{
            "train": f"{root}/train-{{000..003}}.tar",
            "test": f"{root}/test.tar",
            "size": 8,
            "buffer": 7,
            "cache": "cache",
            **settings,
        }
    )


def flat(lists) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def numbers(x: torch.Tensor) -> list[int]:
    return x[:, 0, 4, 4].tolist()


# --- what is in them ---


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["ustar", "gnu", "pax"])
@pytest.mark.parametrize("label", ["cls", "json"])
def test_samples_are_what_was_put_in(tmp_path, label, form):
    shard(tmp_path / "set/a.tar", range(50), "png", label, form)
    shard(tmp_path / "set/b.tar", range(50, 60), "png", label, form)
    splits = data(tmp_path, train=f"{tmp_path}/set/a.tar", test=f"{tmp_path}/set/b.tar").load(CPU)
    x, y = splits.train.fetch(torch.arange(50))
    assert numbers(x) == list(range(50))
    assert y.tolist() == [n % 5 for n in range(50)]
    assert numbers(splits.test.fetch(torch.tensor([3, 0, 3]))[0]) == [53, 50, 53]
    assert (x.shape, x.dtype, splits.shape, splits.classes) == ((50, 3, 8, 8), torch.uint8, (3, 8, 8), 5)


def test_long_names_and_jpegs(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for n in (1, 200):
            add(tar, f"{'x' * 150}/{n}.v2.jpg", b"a file of another kind")
            add(tar, f"{'x' * 150}/{n}.JPG", encoded(n, "jpg"))
            add(tar, f"{'x' * 150}/{n}.cls", b" 4\n")
    index = webdataset.scan(str(tmp_path / "a.tar"), 0)
    assert index.names == [f"{'x' * 150}/1", f"{'x' * 150}/200"]
    assert index.labels.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{x,y}/{0..1}.tar", ["x/0.tar", "x/1.tar", "y/0.tar", "y/1.tar"]),
        ("http://h/a-{0..0}.tar?k=*", ["http://h/a-0.tar?k=*"]),
        ("one.tar", ["one.tar"]),
    ],
)
def test_patterns_are_spelled_out(pattern, names):
    assert webdataset.expand(pattern) == names


def test_stars_name_what_is_there_and_endless_ranges_are_refused(four):
    assert [Path(p).name for p in webdataset.expand(f"{four}/train-*.tar")] == [f"train-{k:03d}.tar" for k in range(4)]
    for pattern, says in (
        (f"{four}/no-*.tar", "names no shard"),
        ("{5..4}", "names no shard"),
        ("{0..999999999}.tar", "more than 100,000 shards"),
    ):
        with pytest.raises(UserError, match=says):
            webdataset.expand(pattern)


def test_without_test_shards_samples_are_held_out_by_name(four):
    def held_out(train: str) -> set[int]:
        splits = data(four, train=train, test=None, holdout=0.3).load(CPU)
        found = [numbers(s.fetch(torch.arange(len(s)))[0]) for s in (splits.train, splits.test)]
        assert sorted(found[0] + found[1]) == list(range(len(found[0]) + len(found[1])))
        return set(found[1])

    few, more = held_out(f"{four}/train-{{000..001}}.tar"), held_out(f"{four}/train-{{000..003}}.tar")
    assert few
    assert few == {n for n in more if n < 2 * EACH}


# --- order ---


def test_the_order_is_every_sample_once_near_its_shard_and_new_each_epoch(tmp_path):
    for k in range(20):
        shard(tmp_path / f"set/train-{k:03d}.tar", range(k * EACH, (k + 1) * EACH))
    shard(tmp_path / "set/test.tar", range(3))
    source = data(tmp_path / "set", train=f"{tmp_path}/set/train-{{000..019}}.tar", buffer=20).load(CPU).train
    orders = {(seed, epoch): source.order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    for order in orders.values():
        assert sorted(order.tolist()) == list(range(200))
        by_shard = order // EACH
        for k in range(20):  # a shard's samples lie within its own length and a window on either side
            places = (by_shard == k).nonzero().flatten()
            assert places.max() - places.min() < EACH + 2 * 20
    distinct = {tuple(order.tolist()) for order in orders.values()}
    assert len(distinct) == 4
    assert torch.equal(source.order(1, 1), orders[1, 1])
    in_shards = orders[0, 0] // EACH
    assert (in_shards.diff() != 0).sum() > 60  # mixed, not one shard after the other
    firsts = [int(source.order(seed, 0)[0]) // EACH for seed in range(12)]
    assert len(set(firsts)) > 4


LOADERS = {
    "sync": Loader,
    "workers(1)": lambda: Workers(num_workers=1),
    "workers(3)": lambda: Workers(num_workers=3),
    "threads": lambda: Threads(num_threads=3),
}


def epoch(source, loader: Loader, epoch: int = 1, world: World | None = None, skip: int = 0) -> list[list[int]]:
    """The numbers in each micro-batch of an epoch in updates of 8, two micro-batches each."""
    batch = Accumulate(global_batch=8, accumulation_steps=2)
    requests = batch.over(Order(len(source), source.order)).requests(3, epoch, world or World(), False, skip=skip)
    return [numbers(m.x) for m in loader.stream(Pipeline(source, (), None, 3), requests, CPU, torch.contiguous_format)]


@pytest.mark.parametrize("name", LOADERS)
def test_the_order_is_the_same_for_all_loaders_ranks_and_resumed_runs(four, name):
    source = data(four).load(CPU).train
    expected = source.order(3, 1).tolist()
    whole = epoch(source, LOADERS[name]())
    assert flat(whole) == expected
    assert epoch(source, LOADERS[name](), skip=3) == whole[6:]
    ranks = [epoch(source, LOADERS[name](), world=World(rank, 2)) for rank in range(2)]
    for update in range(5):
        together = flat(flat(rank[2 * update : 2 * update + 2]) for rank in ranks)
        assert together == expected[8 * update : 8 * update + 8]


def test_a_batch_takes_the_order_that_it_is_given():
    turned = Order(8, lambda seed, epoch: torch.arange(8).flip(0))
    given = list(Batch(global_batch=4).over(turned).requests(0, 0, World(), True))
    assert [r.indices.tolist() for r in given] == [[7, 6, 5, 4], [3, 2, 1, 0]]
    plain = torch.cat([r.indices for r in Batch(global_batch=4).over(shuffled(8)).requests(0, 0, World(), True)])
    assert plain.tolist() != list(range(8))[::-1]


def words(root: Path) -> list[str]:
    shards_ = [f'data.train="{root}/train-{{000..003}}.tar"', f'data.test="{root}/test.tar"']
    return ["data=webdataset", *shards_, "data.size=8", "data.buffer=7", "data.cache=cache", "batch.global_batch=8"]


def test_a_run_goes_on_in_the_same_order(tiny, four):
    """Three updates and five are eight, to the bit: the trainer asks the source for its order, also when it goes on."""
    resumed(tiny(*words(four)), 3, 8)


def test_whole_shards_are_held_out_where_there_are_enough(tmp_path):
    for k in range(10):
        shard(tmp_path / f"set/train-{k:03d}.tar", range(k * EACH, (k + 1) * EACH))
    option = data(tmp_path / "set", train=f"{tmp_path}/set/train-{{000..009}}.tar", test=f"{tmp_path}/set/train-000.tar")
    sets = option.load_sets(torch.device("cpu"))
    shards_ = [set(source.table.shard.tolist()) for source in (sets.train, sets.validation)]
    assert (len(shards_[0]), len(shards_[1]), shards_[0] & shards_[1]) == (9, 1, set())
    assert sorted(sets.train.order(0, 0).tolist()) == list(range(9 * EACH))
    few = data(tmp_path / "set", test=f"{tmp_path}/set/train-009.tar").load_sets(torch.device("cpu"))
    assert (len(few.train), len(few.validation)) == (36, 4), "of four shards samples are held out"


def test_the_trainer_takes_the_sources_order(make, four):
    trainer = make(*words(four), "data.validation=null", "epochs=2", "updates=null")
    asked = torch.cat([request.indices for request in trainer.requests()])
    source = trainer.train_data.source
    assert torch.equal(asked, torch.cat([source.order(0, 0), source.order(0, 1)]))


# --- the index ---


def test_a_shard_is_scanned_once_and_again_when_it_has_changed(four, monkeypatch):
    scanned: list[str] = []
    scan = webdataset.scan
    monkeypatch.setattr(webdataset, "scan", lambda name, size: scanned.append(Path(name).name) or scan(name, size))
    data(four).load(CPU)
    assert sorted(scanned) == ["test.tar", *(f"train-{k:03d}.tar" for k in range(4))]
    scanned.clear()
    source = data(four).load(CPU).train
    assert scanned == []
    assert numbers(source.fetch(torch.arange(40))[0]) == list(range(40))
    shard(four / "train-002.tar", range(100, 104))
    source = data(four).load(CPU).train
    assert scanned == ["train-002.tar"]
    assert numbers(source.fetch(torch.arange(20, 24))[0]) == [100, 101, 102, 103]


def test_a_damaged_or_hostile_index_is_made_anew(four):
    expected = numbers(data(four).load(CPU).train.fetch(torch.arange(40))[0])
    kept = sorted(Path("cache").glob("*.safetensors"))
    assert len(kept) == 5
    kept[0].write_bytes(kept[0].read_bytes()[:300])
    kept[1].write_bytes(b"")
    a, label = np.frombuffer(b"a", np.uint8), np.zeros(1, np.int64)
    save_file({"names": a, "spans": np.zeros((1, 2), np.float32), "labels": label}, kept[2])
    save_file({"names": a, "spans": np.array([[0, 10**12]]), "labels": label}, kept[3])
    kept[4].write_bytes(kept[4].read_bytes().replace(b"names", b"nemas"))
    assert numbers(data(four).load(CPU).train.fetch(torch.arange(40))[0]) == expected


def test_an_index_that_is_a_pipe_is_made_anew(four):
    path = next(iter(four.glob("*.tar"))) if four.is_dir() else four
    made = webdataset.load_index(str(path), Path("cache"))
    (kept,) = Path("cache").glob("*.safetensors")
    kept.unlink()
    os.mkfifo(kept)
    assert webdataset.load_index(str(path), Path("cache")).names == made.names
    assert kept.is_file()


def test_many_threads_read_indices_at_once_and_parse_no_python(four, monkeypatch):
    expected = data(four).load(CPU).train.table
    files = [str(four / f"train-{k:03d}.tar") for k in range(4)]
    monkeypatch.setattr(webdataset, "scan", None)  # every index is in the cache
    monkeypatch.setattr("ast.parse", None)  # numpy reads the header of an .npy file by ast.literal_eval
    monkeypatch.setattr("ast.literal_eval", None)
    with ThreadPoolExecutor(32) as pool:
        indices = list(pool.map(lambda file: webdataset.load_index(file, Path("cache")), files * 100))
    for number, index in enumerate(indices):
        mine = slice(number % 4 * EACH, number % 4 * EACH + EACH)
        assert index.names == expected.names[mine].tolist()
        assert torch.equal(torch.from_numpy(index.spans), expected.spans[mine])
        assert torch.equal(torch.from_numpy(index.labels), expected.labels[mine])


def test_an_index_keeps_names_that_are_no_utf8(tmp_path):
    path = shard(tmp_path / "set/a.tar", (), extra=[("\udcff\u20ac.png", encoded(1, "png")), ("\udcff\u20ac.cls", b"1")])
    made, read = (webdataset.load_index(str(path), tmp_path / "cache") for _ in range(2))
    assert made.names == read.names == ["\udcff\u20ac"]


def test_a_place_that_cannot_be_written_costs_only_the_index(four):
    Path("file").write_text("")
    assert len(data(four, cache="file/cache").load(CPU).train) == 40


# --- what should not be there ---


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (member("00001.jpg", tarfile.SYMTYPE, "/etc/passwd"), r"'00001\.jpg' is a link"),
        (member("00001.jpg", tarfile.LNKTYPE, "some/folder/00000.png"), "is a link"),
        (member("../00001.jpg"), "points out of the archive"),
        (member("a/../../b.cls"), "points out of the archive"),
        (member("/abs/1.jpg"), "points out of the archive"),
        (member("pipe.jpg", tarfile.FIFOTYPE), "neither a file nor a folder"),
    ],
)
def test_links_and_ways_out_are_refused(tmp_path, bad, says):
    path = shard(tmp_path / "set/a.tar", range(3))
    with tarfile.open(path, "a") as tar:
        tar.addfile(bad)
    with pytest.raises(DataError, match=rf"a\.tar: its member .*{says}"):
        data(tmp_path, train=str(path), test=str(path)).load(CPU)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ([("9.png", b"x")], r"sample '9' has no label"),
        ([("9.cls", b"1")], r"sample '9' has no image"),
        ([("9.png", b"x"), ("9.json", b'{"caption": 3}')], r"sample '9' has no label"),
        ([("9.png", b"x"), ("9.cls", b"cat")], r"'9\.cls' is no label"),
        ([("9.png", b"x"), ("9.cls", b"-1")], r"'9\.cls' is no label"),
        ([("9.png", b"x"), ("9.cls", b"1.5")], r"'9\.cls' is no label"),
        ([("9.png", b"x"), ("9.cls", b"[" * 100_000)], r"'9\.cls' is no label"),
        ([("9.png", b"x"), ("9.cls", b"1" * (1 << 21))], r"'9\.cls' has 2,097,152 bytes"),
        ([("some/folder/00001.jpg", b"x")], r"'some/folder/00001' is there twice"),
        ([("some/folder/00001.cls", b"1")], r"'some/folder/00001' is there twice"),
    ],
)
def test_samples_that_are_none_are_named(tmp_path, extra, says):
    path = shard(tmp_path / "set/a.tar", range(3), extra=extra)
    with pytest.raises(DataError, match=rf"a\.tar: .*{says}"):
        data(tmp_path, train=str(path), test=str(path)).load(CPU)


def test_an_empty_shard_is_passed_over_and_said(tmp_path, caplog):
    shard(tmp_path / "0.tar", range(20))
    shard(tmp_path / "1.tar", [])
    splits = data(tmp_path, train=str(tmp_path / "{0,1}.tar"), test=None, holdout=0.3, validation=None).load(CPU)
    assert len(splits.train) + len(splits.test) == 20
    assert "1 of 2 shards hold no samples and are passed over, the first is" in caplog.text
    with pytest.raises(UserError, match="gives 0 training and 0 test images"):
        data(tmp_path, train=str(tmp_path / "1.tar"), test=None).load(CPU)


@pytest.mark.parametrize("how", ["in a header", "in a member", "between members", "without an end", "empty", "gzip", "garbage"])
def test_a_shard_that_is_cut_short_is_named(tmp_path, how):
    path = shard(tmp_path / "set/a.tar", range(30))
    content = path.read_bytes()
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-3]  # an image
    cut = {
        "in a header": content[: last.offset + 200], "in a member": content[: last.offset_data + 20],
        "between members": content[: last.offset], "without an end": content[: tar_end(path)], "empty": b"",
        "gzip": __import__("gzip").compress(content), "garbage": content[: last.offset] + b"?" * 20000,
    }  # fmt: skip
    path.write_bytes(cut[how])
    with pytest.raises(DataError, match=r"a\.tar is cut short or no plain tar archive"):
        data(tmp_path, train=str(path), test=str(path)).load(CPU)


def tar_end(path: Path) -> int:
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    return last.offset_data + -(-last.size // 512) * 512


def test_a_broken_image_is_named_by_its_shard(tmp_path):
    path = shard(tmp_path / "set/a.tar", range(3), extra=[("bad.png", b"nothing"), ("bad.cls", b"0")])
    words = {"train": str(path), "test": str(path)}
    with pytest.raises(DataError, match=r"a\.tar: bad cannot be read as an image"):
        data(tmp_path, **words).load(CPU).train.fetch(torch.arange(4))


def test_labels_beyond_the_classes_and_missing_shards_are_refused(four, problems):
    with pytest.raises(DataError, match=r"data\.classes=3, but there are labels up to 4: raise it to 5"):
        data(four, classes=3).load(CPU)
    assert data(four, classes=9).load(CPU).classes == 9
    assert any("needs data.train" in p for p in problems("data=webdataset"))
    words = ["data=webdataset", f'data.train="{four}/train-{{000..005}}.tar"']
    assert any("train-004.tar is no file (2 of 6 shards" in p for p in problems(*words))
    source = data(four).load(CPU).train
    (four / "train-000.tar").write_bytes(b"short")
    with pytest.raises(DataError, match=r"train-000\.tar ends before byte .*: it was cut after it was indexed"):
        source.fetch(torch.tensor([0]))


# --- on a web server ---


class Ranged(http.server.SimpleHTTPRequestHandler):
    """A file server that knows ranges, and fails when it is told to."""

    failures = 0
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self):
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if type(self).failures:
            type(self).failures -= 1
            self.send_error(503)
        elif not path.is_file():
            self.send_error(404)
        elif match is None or "plain" in self.path:
            super().do_GET()
        else:
            content = path.read_bytes()
            first, last = int(match[1]), min(int(match[2]), len(content) - 1)
            self.asked.append(match[0])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.send_header("Content-Length", str(last + 1 - first))
            self.end_headers()
            self.wfile.write(content[first : last + 1])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(Ranged, "failures", 0)
    monkeypatch.setattr(Ranged, "asked", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Ranged, directory=str(tmp_path))) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.mark.parametrize("name", ["sync", "workers(3)", "threads"])
def test_remote_shards_give_the_same_samples_in_the_same_order(four, server, name, monkeypatch):
    monkeypatch.setattr(webdataset, "REQUEST_BYTES", 3000)
    local, remote = data(four).load(CPU).train, data(f"{server}/set").load(CPU).train
    assert torch.equal(local.order(3, 1), remote.order(3, 1))
    assert epoch(remote, LOADERS[name]()) == epoch(local, Loader())
    asked = len(Ranged.asked)
    data(f"{server}/set").load(CPU)
    assert len(Ranged.asked) == asked + 5 + 8  # one byte of each shard, to see whether it is the same; images for their range


def test_a_server_that_stumbles_is_asked_again_and_one_that_fails_is_named(four, server):
    source = data(f"{server}/set", on_error="skip", max_skipped=40).load(CPU).train
    Ranged.failures = 2
    assert numbers(source.fetch(torch.tensor([5]))[0]) == [5]
    Ranged.failures = 99
    with pytest.raises(DataError, match=r"train-000\.tar cannot be fetched .*503"):  # not skipped: the sample is not at fault
        source.fetch(torch.tensor([5]))
    Ranged.failures = 0
    assert source.skipped() == []
    with pytest.raises(DataError, match=r"nothing\.tar cannot be fetched .*404"):
        data(four, train=f"{server}/set/nothing.tar").load(CPU)
    shard(four / "plain.tar", range(3))
    with pytest.raises(DataError, match=r"plain\.tar: the server does not support ranges"):
        data(four, train=f"{server}/set/plain.tar").load(CPU)


# --- onward ---


@pytest.mark.parametrize("form", [[], ["--jpeg"]], ids=["decoded", "jpeg"])
def test_shards_can_be_packed(four, tmp_path, form):
    words = ["data=webdataset", f"data.test={four}/test.tar", "data.cache=cache"]
    assert main.main(["pack", f"{four}/train-{{000..003}}.tar", str(tmp_path / "packed"), "--size", "8", *words, *form]) == 0
    source = Packed(root=str(tmp_path / "packed")).load(CPU).train
    assert numbers(source.fetch(torch.arange(40))[0]) == pytest.approx(list(range(40)), abs=3)
