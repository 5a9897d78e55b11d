"""Data sets whose files were changed: indices, tables, lines, masks, headers of archives: read to the end, or refused."""

import hashlib
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import note
from hypothesis import strategies as st

from drivetrain import data
from drivetrain.data import cifar10 as cifar10_options
from drivetrain.data import images
from drivetrain.data import jsonl as jsonl_options
from drivetrain.data import masks as masks_options
from drivetrain.data import packed as packed_options
from drivetrain.data import tabular as tabular_options
from drivetrain.data import webdataset as webdataset_options
from drivetrain.data.stored import write_index
from tests.support import odd, sets

FIELDS = [(0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)]  # where they begin in a tar's header; bytes
VALUES = [
    b"../../x", b"/etc/passwd", b"\xff" * 12, b"77777777777", b"\x80" + b"\x7f" * 11, b"00000000000", b"x", b"L", b"S", b"2",
    b"1", b"g", b"K", b"", b"-1", b"\xff" * 11 + b"\x00", b"a" * 155,
]  # fmt: skip


class Form(NamedTuple):
    """A form of data: the files that are damaged, how it is loaded, and what goes with those files."""

    damaged: tuple[str, ...]
    option: Callable[[Path], data.Data]
    beside: tuple[str, ...] = ()


def shards(folder: Path) -> data.Data:
    return webdataset_options.WebDataset(train=str(folder / "shard.tar"), size=8, holdout=0.2, cache=str(folder / "cache"))


def texts(**words: str) -> Callable[[Path], data.Data]:
    return lambda folder: jsonl_options.Jsonl(path=str(folder / "texts.jsonl"), length=8, holdout=0.2, **words)


FORMS = {
    "packed": Form(("packed/*",), lambda f: packed_options.Packed(root=str(f / "packed"))),
    "jsonl": Form(("texts.jsonl",), texts()),
    "labelled": Form(("texts.jsonl",), texts(label="kind")),
    "labels_csv": Form(
        ("table.csv",),
        lambda f: images.LabelsCsv(path=str(f / "table.csv"), root=str(f), target="kind", size=8, holdout=0.2),
        ("masked/images/*",),
    ),
    "tabular": Form(("table.csv",), lambda f: tabular_options.Tabular(path=str(f / "table.csv"), target="kind", columns=["x"])),
    "masks": Form(
        ("masked/masks/*", "masked/images/*"),
        lambda f: masks_options.Masks(root=str(f / "masked"), classes=3, size=8, holdout=0.2)
    ),
    "webdataset": Form(("shard.tar",), shards),
    "index": Form(("cache/*",), shards, ("shard.tar",)),
    "cifar10": Form(("cifar/*",), lambda f: cifar10_options.Cifar10(root=str(f / "cifar"))),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each form. Each was read once: imports, and what libraries allocate once, are not an example's."""
    folder = tmp_path_factory.mktemp("whole")
    sets.write(folder, samples=20, with_hub=False)
    (folder / "cache").mkdir()
    for form in FORMS.values():
        read(form, folder)
    return folder


def read(form: Form, folder: Path) -> None:
    """Load a data set, and fetch each sample of each split."""
    splits = form.option(folder).load_sets(torch.device("cpu"))
    for source in (splits.train, splits.test, splits.validation):
        if source is not None:
            for indices in torch.arange(min(len(source), 200)).split(16):
                source.fetch(indices)


@odd.fuzz
def test_odd_data_is_read_or_refused(whole: Path, tmp_path: Path) -> None:
    def judged(drawn: tuple[str, random.Random]) -> str:
        name, draw = drawn
        form, folder = FORMS[name], tmp_path / "case"
        odd.remove(folder)
        for pattern in (*form.damaged, *form.beside):
            for file in sorted(whole.glob(pattern)):
                copy = folder / file.relative_to(whole)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        if name == "index":  # it knows its shard by the path
            odd.remove(folder / "cache")
            (folder / "cache").mkdir()
            read(form, folder)
        files = sorted(file for pattern in form.damaged for file in folder.glob(pattern))
        for file in draw.sample(files, min(len(files), draw.choice([1, 1, 2]))):
            note(f"{name}: {file.name} {change(draw, file)}")
        return odd.outcome(lambda: read(form, folder), folder, *linked(folder), writable=(folder,))

    odd.tried(st.tuples(st.sampled_from(sorted(FORMS)), odd.dice), judged)


def linked(folder: Path) -> list[Path]:
    """The files that links in a data folder lead to. Links are the user's own, and are followed."""
    return [folder / os.readlink(path) for path in folder.rglob("*") if path.is_symlink()]


def change(draw: random.Random, file: Path) -> str:
    """Damage a file in a way that suits it; return how."""
    if file.suffix == ".tar" and draw.randrange(10) < 7:
        return of_header(draw, file)
    table = file.with_name("train.table")  # which an earlier change may have made a folder or a link
    if file.name == "index.json" and draw.randrange(10) < 3 and table.is_file() and not table.is_symlink():
        return digested(draw, file, table)
    return odd.damage(draw, file)


def of_header(draw: random.Random, file: Path) -> str:
    """Change a field of a member's header, whose checksum is right again."""
    content = bytearray(file.read_bytes())
    with tarfile.open(file) as tar:
        at = draw.choice(tar.getmembers()).offset
    begin, length = draw.choice(FIELDS)
    value = draw.choice([*VALUES, bytes(draw.randrange(256) for _ in range(8))])[:length]
    content[at + begin : at + begin + length] = value.ljust(length, b"\0")
    content[at + 148 : at + 156] = b" " * 8
    content[at + 148 : at + 156] = f"{sum(content[at : at + 512]):06o}\0 ".encode()
    file.write_bytes(content)
    return f"header at {at}, {begin}: {value!r}"


def digested(draw: random.Random, file: Path, table: Path) -> str:
    """Change a table of packed images, and its hash in the index."""
    index, changed = json.loads(file.read_bytes()), odd.of_bytes(draw, table.read_bytes())
    table.write_bytes(changed)
    index["splits"]["train"]["table"] = hashlib.blake2b(changed).hexdigest()
    write_index(file.parent, index)
    return "and its table"
