"""Data sets that anyone may have made: what cannot be is refused, by the name of its file; nothing waits or fills memory."""

import ast
import contextlib
import io
import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.core.errors import DataError, UserError
from drivetrain.data import packed, stored, untrusted, webdataset
from drivetrain.data.cifar10 import read_members
from drivetrain.data.decoding import WantedPart
from drivetrain.data.masks import MaskReading
from drivetrain.data.untrusted import number_of_classes
from tests.support.sets import images_of


def png(width=4, height=4) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height)).save(content, "PNG")
    return content.getvalue()


pytestmark = pytest.mark.timeout(30)  # what waits for a pipe fails, and does not hold the suite up


def odd_files() -> dict[str, Path]:
    """Files called as images that are none, and that a plain read would wait for or never end."""
    os.mkfifo("fifo.png")
    Path("endless.png").symlink_to("/dev/zero")
    Path("folder.png").mkdir()
    with open("huge.png", "wb") as file:  # sparse
        file.truncate(4 << 20)
    return {name: Path(f"{name}.png") for name in ("fifo", "endless", "folder", "huge")}


def test_image_files_that_never_end(tmp_path):
    for path in odd_files().values():
        with pytest.raises(DataError, match=path.name):
            images_of([(path, 0)], 4, 10_000).fetch(torch.tensor([0]))
        with pytest.raises(DataError, match=path.name):
            MaskReading((0, 1), None, 10_000, None).read(str(path), "a.png", WantedPart((4, 4), (0, 0, 4, 4), 1, False), 4)
    Path("a.png").write_bytes(png())
    Path("link.png").symlink_to("a.png")  # as data sets have
    source = images_of([(Path("fifo.png"), 0), (Path("link.png"), 1)], 4, 10_000, 1.0, "skip", 1)
    assert source.fetch(torch.tensor([0]))[1].tolist() == [1]


def test_texts_and_tables_that_never_end(monkeypatch):
    from drivetrain.data.jsonl import Jsonl
    from drivetrain.data.tables import Form, open_table

    monkeypatch.setattr(untrusted, "MOST_LINE", 1 << 20)
    for name in ("t.jsonl", "t.csv"):
        Path(name).write_text("{}" if name == "t.jsonl" else "a,b\n" + "1,2\n" * 1000)
        os.truncate(name, 1 << 40)  # sparse
        with pytest.raises(UserError, match=rf"{name} has a (line|row) of more than"):
            Jsonl(path=name).load(torch.device("cpu")) if name == "t.jsonl" else open_table(Path(name), Form()).cells()
        Path(name).unlink()
        os.mkfifo(name)
        with pytest.raises(UserError, match=name):
            Jsonl(path=name).load(torch.device("cpu")) if name == "t.jsonl" else open_table(Path(name), Form()).cells()
    with pytest.raises(DataError, match=r"gone.jsonl cannot be read"):
        Jsonl(path="gone.jsonl").load_sets(torch.device("cpu"))


def test_archives_shards_and_packed_files_that_never_end():
    odd_files()
    for name in ("fifo.png", "endless.png", "folder.png"):
        for read in (
            lambda file: webdataset.scan(file, 0),
            lambda file: webdataset.read_range(file, 0, 1),
            lambda file: read_members(Path(file), set(), 1),
        ):
            with pytest.raises(DataError, match=f"{name} is no ordinary file"):
                read(name)


def test_no_file_of_a_data_set_is_opened_in_another_way():
    """A plain `open` waits for a pipe for ever."""
    texts = {module: module.read_text(encoding="utf-8") for module in Path(untrusted.__file__).parent.glob("*.py")}
    for module, text in texts.items():
        for call in ast.walk(ast.parse(text)) if re.search(r"(?<![\w.])open\(", text) else ():
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "open":
                assert any(given.arg == "opener" for given in call.keywords), f"{module.name}, line {call.lineno}"


def test_a_bomb_names_its_file_and_the_setting(tmp_path):
    Path("bomb.png").write_bytes(png(1000, 1000))  # 3 KB
    with pytest.raises(DataError, match=r"bomb\.png has 1000×1000 pixels, over data\.max_pixels=50000"):
        images_of([(Path("bomb.png"), 0)], 4, 50_000).fetch(torch.tensor([0]))


@pytest.mark.parametrize("highest", [10**9, 2**31 - 1, 5000])
def test_a_label_far_beyond_the_samples(highest):
    with pytest.raises(DataError, match=r"set data\.classes"):
        number_of_classes(highest, 50, None, "data.train=x.tar")
    assert number_of_classes(highest, 50, highest + 1, "") == highest + 1
    assert number_of_classes(999, 50, None, "") == 1000
    assert number_of_classes(highest, highest + 1, None, "") == highest + 1


def shard(members: list[tuple[str, bytes]]) -> str:
    with tarfile.open("x.tar", "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return "x.tar"


ODD_NAMES = [
    "a//b.png",
    "./b.png",
    "\udcff.png",
    "a\nb.png",
    "é.png",
    "n" * 300 + ".png",
    " .png",
    "-.png",
    "a\\b.png",
]
IMPOSSIBLE = [".", "a/..", "/x.png", "../x.png", ""]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_in_a_shard_are_read_and_kept(name):
    label = name[: -len("png")] + "cls"
    index = webdataset.load_index(shard([(name, png()), (label, b"3")]), Path("cache"))
    again = webdataset.load_index("x.tar", Path("cache"))
    assert index.labels.tolist() == again.labels.tolist() == [3]
    assert index.names == again.names
    assert len(list(Path("cache").iterdir())) == 1


def test_hidden_files_in_a_shard_are_no_samples():
    hidden = [(name, b"x") for name in (".png", "a/.png", "...png", "._a.png", ".DS_Store")]
    assert webdataset.scan(shard([("a.png", png()), *hidden, ("a.cls", b"0")]), 0).names == ["a"]


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_names_in_a_shard_are_refused_or_ignored(name):
    members = [("a.png", png()), ("a.cls", b"0"), (name, b"x")]
    with contextlib.suppress(DataError):
        assert webdataset.scan(shard(members), 0).names == ["a"]


def test_a_pattern_over_the_whole_disk_is_not_listed(monkeypatch):
    monkeypatch.delattr(webdataset.glob, "iglob")
    for pattern in ("/*/*/*/*/*", "/*/*/nothing", "~/?/[a-z]/x.tar"):
        with pytest.raises(UserError, match="several folders"):
            webdataset.expand(pattern)


def test_a_pattern_of_too_many_files(monkeypatch):
    monkeypatch.setattr(webdataset, "MAX_SHARDS", 3)
    for n in range(5):
        Path(f"{n}.tar").touch()
    with pytest.raises(UserError, match="more than 3 shards"):
        webdataset.expand("*.tar")
    assert webdataset.expand("[01].tar") == ["0.tar", "1.tar"]


ENTRY = {"samples": 1, "bytes": 48, "table": "x"}
WRONG = {
    "shape": [None, 3, [3, 4], [3, 4, -4], [3, 4, 10**9], ["3", 4, 4], [3.0, 4, 4]],
    "kind": [None, "pickle", 3],
    "classes": ["2", 0, -1, None, 2.5, True, 10**400],
    "names": ["ab", {"a": 1}, [1]],
    "normalize": [1, [1, 2, 3], {"mean": 1}, {"mean": [1.0]}, {"mean": [1.0], "std": ["a"]}],
    "splits": [[], {}, {"train": 1, "test": 2}, {"train": ENTRY}, {"train": ENTRY, "test": {**ENTRY, "samples": "1"}},
               {"train": ENTRY, "test": {**ENTRY, "bytes": None}}, {"train": ENTRY, "test": {**ENTRY, "table": 3}}],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_index_of_wrong_types_is_refused_in_our_words(name):
    good = {
        "format": stored.FORMAT, "version": stored.VERSION, "kind": "uint8", "shape": [3, 4, 4], "classes": 2, "names": None,
        "normalize": None, "splits": {"train": ENTRY, "test": ENTRY},
    }  # fmt: skip
    stored.write_index(Path(), good)
    assert stored.read_index(Path()) == good
    for value in WRONG[name]:
        Path("index.json").write_text(json.dumps({**good, name: value}))
        with pytest.raises(UserError, match=f"no index that drivetrain wrote .its.*{name}"):
            stored.read_index(Path())
    Path("index.json").write_text(json.dumps({key: value for key, value in good.items() if key != name}))
    with pytest.raises(UserError, match=f"no index that drivetrain wrote .its.*{name}"):
        stored.read_index(Path())


@pytest.mark.parametrize("row", [[49, 0, 0], [-48, 0, 0], [48, 0, 2], [48, 0, -1], [2**62, 0, 0]])
def test_a_table_that_names_what_is_not_there(row):
    import hashlib

    content = np.array([row], "<i8").tobytes()
    Path("train.table").write_bytes(content)
    Path("train.data").write_bytes(bytes(48))
    entry = {"samples": 1, "bytes": 48, "table": hashlib.blake2b(content).hexdigest()}
    index = {"kind": "uint8", "shape": [3, 4, 4], "classes": 2, "splits": {"train": entry}}
    with pytest.raises(DataError, match=r"train\.table is no table of these"):
        packed.open_split(Path(), index, "train", (3, 4, 4), 100, verify=False)
